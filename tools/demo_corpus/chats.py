"""Dialogues written by hand: in the workshop, on the phone, at the library, about nothing much."""

from demo_corpus.dice import scenes

CHATS = scenes("""
A: Why do you oil the stone?
B: So that the blade floats a little. A dry stone fills up with steel and stops cutting.
A: And when is it sharp?
B: When it shaves the hair on my arm. I have one bald arm and a good reputation.
---
A: The drawer sticks.
B: In {season} everything sticks. Rub a candle along the runners.
A: A candle?
B: Wax is the oldest machine oil there is. Just don't light it.
---
A: May I use the big saw?
B: Which way does the board run?
A: Along the grain.
B: Then take the rip saw, the one with teeth like chisels. The other one is for cutting across.
A: They look the same to me.
B: They did to me, until I had sawn for an hour with the wrong one.
---
A: How long does the glue take?
B: Longer than you think and less long than you fear. Leave it until tomorrow.
A: And if I pull on it now?
B: Then you will know how long it takes.
---
A: Good morning, library of {place}.
B: I have a book that is {number} years late.
A: What is it called?
B: "How to Keep Appointments".
A: Keep it. You need it more than we do.
---
A: Do you have anything about water mills?
B: Third shelf on the left, between weather and weaving.
A: And about {bird}?
B: That is in the reading room. I mean it; the window was open.
---
A: I have lost {thing}.
B: Where did you last see it?
A: If I knew that, I would go there.
B: People say so, and then it is always in the other coat.
A: ... It is in the other coat.
---
A: Hello, is this the mill?
B: It is. Speak up, we are grinding {grain}.
A: I ordered {few} sacks!
B: Of socks?
A: SACKS!
B: They will be ready on {weekday}. The socks we do not make.
---
A: Will it rain?
B: My knee says yes, the barometer says no.
A: Whom do you trust?
B: The knee. The barometer has never carried me anywhere.
---
A: Is this seat taken?
B: Only by {thing}. I can hold it.
A: Are you going far?
B: To {place}, and then as far as it goes.
A: What do you do there?
B: I tune bells. Somebody has to.
---
A: What are you cooking?
B: {Food}.
A: It smells of {smell}.
B: That is the stove. The {food} will smell of something else, if we are lucky.
---
A: How much salt?
B: Until it is enough.
A: That is not a measure.
B: Then take one spoon, taste it, and call the rest experience.
---
A: The dough is too wet.
B: Wait a quarter of an hour. Flour drinks slowly.
A: And if it is still too wet?
B: Then we are making {food} after all.
---
A: I would like to send this parcel to {place}.
B: What is inside?
A: {Thing}, and some {food}.
B: Will the {food} survive the journey?
A: Better than I shall.
B: Then I'll put the blue sticker on it.
---
A: How do you know that the ice will hold?
B: By its colour. Clear and blue is strong; white is weak; grey is a bath.
A: What colour is this?
B: Let us walk around.
---
A: Why does the wheel turn to the left?
B: Stand on the other side.
A: Now it turns to the right!
B: You see. Half of all questions are about where one stands.
---
A: The clock has stopped.
B: Did you wind it?
A: I thought you did.
B: And so time ended, on a {weekday}, over a misunderstanding.
---
A: Riddle: what goes round all day and stays in its place?
B: The mill wheel.
A: What eats {grain} and is never full?
B: The mill.
A: And what has a bed and never sleeps?
B: The river. Ask me something hard.
---
A: What has a neck and no head?
B: A bottle.
A: Teeth and no mouth?
B: A rake, a saw, a gear wheel. You must say which.
A: Any of them. I only had the one answer.
---
A: My plant is dying.
B: How often do you water it?
A: Every day. Twice on {weekday}s.
B: It is drowning, politely. Leave it alone for a week.
---
A: Can you mend this cup?
B: Where is the handle?
A: In my pocket. And this bit. And this.
B: It will be a cup again, but it will always have a story.
---
A: Which path goes to {place}?
B: Both. The left one is shorter, the right one arrives.
A: What is wrong with the left one?
B: The bridge is on holiday.
---
A: You play the {tree} flute?
B: I play it, and it plays {sound}.
A: Is that how it should be?
B: We are in negotiations.
---
A: I can't sleep. The mill is too quiet.
B: They closed the sluice for the night.
A: Could they open it a little?
B: For you I shall ask {someone}.
---
A: What did you see from the tower?
B: {Place}, and behind it {river}, and behind that weather.
A: What sort?
B: {Weather}, by the look of it. We have an hour.
---
A: Teach me a knot.
B: Make a loop. The rabbit comes out of the hole, runs round the tree, and goes back into the hole.
A: It fell apart.
B: Then your rabbit went round the wrong way. Again.
A: It holds!
B: That is a bowline. It has never let anyone down, except on purpose.
---
A: How old is this {tree}?
B: Hug it.
A: Excuse me?
B: One metre and a half round at the chest is about sixty years, for a tree in the open. My arms are the tape.
---
A: Would you swap {thing} for {thing}?
B: Does yours work?
A: Mostly.
B: So does mine. Done.
---
A: The letter begins "Sehr geehrte Damen und Herren". Is that rude?
B: On the contrary. It is German for "I have no idea who reads this".
A: And "Mit freundlichen Grüßen"?
B: "I have finished."
---
A: Is the coffee strong?
B: The spoon has been standing up since {weekday}.
A: Then half a cup, and the other half milk.
B: A café au lait for the brave.
---
A: Who left the gate open?
B: The wind.
A: The wind does not wear boots.
B: You have not met our wind.
---
A: I dreamed that the river ran backwards.
B: Did the wheel turn the other way?
A: Yes, and the flour turned into {grain}.
B: Good. Then we could have sold it twice.
""")

QUIPS = scenes("""
A: Ready?
B: Almost.
---
A: Is it far to {place}?
B: Not if you like walking.
---
A: Coffee?
B: Always. ☕
---
A: Who is there?
B: {Someone}. Open up, it's raining!
---
A: Any news from {place}?
B: None, and plenty of it.
---
A: Have you seen {thing}?
B: Under the {grain}.
---
A: What's for supper?
B: {Food}.
A: Again?
B: Still.
---
A: {Bird}!
B: Where?
A: Gone.
---
A: You are late.
B: The ferry was thinking.
---
A: Good night.
B: Gute Nacht. Schlaf schön.
---
A: Καλημέρα!
B: Καλημέρα. You are up early.
---
A: おはよう。
B: おはよう。 Tea is on the stove.
---
A: Does it hold?
B: It holds.
A: Good.
---
A: Left or right?
B: Yes.
---
A: Quel temps fait-il?
B: {Weather}, as you can hear.
---
A: How many sacks today?
B: {Number}. My back says more.
---
A: Pass me the {colour} one.
B: That one is mine.
---
A: What is {river} doing?
B: Rising, slowly.
""")

CONTROL_STRINGS = (
    """Ada: What does <|endoftext|> mean? It stands in the middle of this page.
Ben: There it means nothing. It is thirteen characters, like any others.
Ada: But I have read that it ends a document.
Ben: A certain number ends a document. <|endoftext|> is only how people write that number down.
Ada: So I may say <|endoftext|> as often as I like?
Ben: And I shall go on listening.""",
    """Yuki: Repeat after me: <|eos|>.
Emil: <|eos|>. Am I finished now?
Yuki: Evidently not.""",
)
