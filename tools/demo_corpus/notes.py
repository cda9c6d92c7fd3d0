"""Short forms of prose: postcards, recipes and single sentences."""

from collections.abc import Iterator

from demo_corpus.dice import Dice, endless, grow, items, scenes
from demo_corpus.words import person

SAYINGS = items("""
A mill that never stops has never been cleaned.

Water remembers the lowest place in the garden.

The sharpest knife in the house is the one that nobody admits to having used.

Whoever counts the sacks should not also carry them.

Rain before seven, tea before eight. ☔

A good knot is one that you can still undo in the dark.

Every map is a letter from someone who was not lost.

The oven does not read the recipe.

Two lanterns are a convenience; three are a procession.

There is no bad flour, only flour in the wrong sack.

Slow is the river's word for certain.

Wer früh mahlt, muss trotzdem fegen. (Whoever grinds early must sweep all the same.)

L'eau passe, la pierre reste, et le meunier compte. (The water passes, the stone stays, and the miller counts.)

Το νερό ξέρει τον δρόμο. (The water knows the way.)

水は低いところを忘れない。(Water does not forget the low places.)

Ein Maß, das niemand prüft, heißt Gewohnheit. (A measure that nobody checks is called a habit.)

Un outil prêté revient toujours avec une histoire. (A lent tool always comes back with a story.)

急がない川も海に着く。(A river that does not hurry also reaches the sea.)

Η πέτρα δεν βιάζεται. (The stone is in no hurry.)

Keep the receipt, the string and your temper.

If the wheel sings, listen; if it screams, run.

Never lend a ladder to a man who asks how high it is.

The best place for a spare key is with someone who is usually at home.

A loaf is a clock that you can eat. 🍞

Count twice, cut once, and blame the pencil.

The fish are not impressed by the new bridge.

Frost is the only guest who leaves by the same window.

Good tools are borrowed; excellent tools are hidden.

One swallow makes a mess on the step.

Whatever the question was, the answer is in the shed.
""")

NOTICES = items("""
Lost near {place}: {thing}, of little worth but long acquaintance.

Found on the towpath {daytime}: {thing}. Ask for {name}.

The mill at {place} is closed on {weekday} while {someone} looks at the roof.

Wanted: someone to read the river gauge {daytime}; {drink} provided.

For sale: {few} sacks of {grain}, dry, sieved, and only once sat upon.

No grinding today. The pond is low and so is {name}.

{Bird} on the weir again {daytime}. 🐦

Please do not feed {grain} to the ducks; they have begun to form a queue.

Lesson in basket making on {weekday}, {daytime}; bring {thing}.

Whoever took the {colour} bucket may keep it, but we should like the fish back.

To swap: {thing} for {thing}, or for {food}.

The footbridge at {place} is safe for one cow or {number} philosophers.

Choir practice is moved to the granary, where the echo is kinder.

{Name}: your {grain} is ready, your bill is readier.
""")

GREETINGS = items("""
Dear {name},

My dear {name},

Liebe Grüße aus {place}, dear {name}!

Chère famille, dear {name},

{Name}, you should be here:
""")

SIGHTS = items("""
We arrived {daytime} in {weather}, and the station was locked from the inside.

The river here is called {river}, and it is exactly as wide as a good conversation.

Our room looks out on a {tree}, two chimneys and the back of a very serious statue.

Yesterday we walked to {place} and came back with {thing}, which I cannot explain on a postcard.

Everyone eats {food} at all hours, and I have stopped resisting.

{Someone} showed us how the lock works; it is all patience and one large wheel of {metal}.

At the café they write the bill on the table in {colour} chalk, and wipe it away if you sing.

I have learned to say "good morning" (καλημέρα) to the Greek baker, and he has learned to say it to me.

A traveller from Kyoto taught us the word 水車, which is a water wheel, and drew one in the dust.

The museum has seven rooms: one for {grain}, one for rope, and the others for the keeper's family.

In the evening the whole street smells of {smell}.

We saw {bird} from the train, and {bird} from the other side.

The streets are called Gässchen here, and some are so narrow that umbrellas take turns.

Tomorrow we cross {river} on a ferry that is pulled along a rope by {number} schoolchildren.

I lost my hat to the wind at {place}; it was last seen going north, and looked happy.
""")

FAREWELLS = items("""
Water the {tree}, and don't wait up. Yours, {other}

Until {weekday}, {other}

À bientôt, and love to the cat. {other}

Bis bald, {other}

More when it stops raining. {other} ✉️

Keep some {food} for me. Your {other}
""")

# Each recipe: title, ingredients, steps.
RECIPES = tuple(
    items(scene)
    for scene in scenes("""
Miller's flat bread|{few} cups of {grain} flour|a spoonful of salt|warm water|a little oil

Mix the flour and salt, and add water until the dough stops sticking to your doubts.

Let it rest under a cloth while you sweep the floor.

Roll it as thin as a letter and bake it on a hot stone, a minute on each side.
---
Onion soup for a wet day|{number} onions|butter the size of a walnut|a litre of broth|old bread|hard cheese

Slice the onions thinly and cook them in the butter, slowly, until they are golden and the windows are clouded.

Pour on the broth and let it murmur for half an hour.

Lay the bread on top, then the cheese, and put it under the fire until it blisters.
---
Pears in cider|{number} firm pears|half a litre of cider|honey|one clove for each guest

Peel the pears but leave the stalks, so that there is something to hold on to.

Simmer them in the cider with the cloves until a straw goes in easily.

Take the pears out, boil the cider down with the honey, and pour it over them.
---
Buckwheat crêpes|two cups of buckwheat flour|one egg|salt|water|butter for the pan

Beat the flour, egg and salt with as much water as makes a thin cream, and leave it overnight.

Heat the pan until a drop of water dances, butter it, and pour in a ladle of batter.

Turn the crêpe when its edge lifts; the first one belongs to the cook, or to the dog.
---
Plum jam without fuss|a basket of plums|half their weight in sugar|a stick of cinnamon

Stone the plums, cover them with the sugar, and let them stand until they swim.

Cook them {adverb} in a wide pot, stirring with a spoon of {tree} wood.

When a drop on a cold plate no longer runs, fill the jars to the brim and turn them over.
---
Lentils for travellers|a cup of lentils|one carrot|one onion|a bay leaf|vinegar

Cover the lentils with twice as much water, add the bay leaf, and cook them until they are soft but not sorry.

Fry the carrot and onion in small cubes and stir them in.

Add vinegar at the end, a little more than seems polite.
---
Käsespätzle|{few} eggs|flour|a splash of milk|grated cheese|{few} onions, fried dark

Beat eggs, flour and milk until the batter tears from the spoon in bubbles, and let it rest.

Press it through a coarse sieve into boiling salted water; what floats is ready.

Layer it with the cheese in a warm dish, and put the onions on top.
---
Oat biscuits|two cups of oats|one cup of flour|butter|honey|a pinch of salt

Warm the butter with the honey, and mix in everything else.

Press small heaps on a tray, not too near to each other, as they are sociable.

Bake them until the kitchen smells of {smell}, and then three minutes more.
---
Fish from the race|one trout for each eater|salt|parsley|lemon|butter

Clean the trout, dry them well, and salt them inside and out.

Fry them in butter, {adverb}, and do not touch them until they let go of the pan by themselves.

Serve with the parsley and lemon, and with a story about the one that got away.
---
Lemon barley water|half a cup of barley|a litre of water|the peel of two lemons|sugar

Rinse the barley and boil it in the water for as long as it takes to mend a sock.

Strain it over the lemon peel and sugar, and leave it to cool.

Drink it in the shade, at the end of the row and not before.
""")
)

TIPS = items("""
It keeps for {number} days, if it is hidden.

{Name} adds a grating of nutmeg; {someone} does not speak of it.

Serves {number}, or {name} alone.

Goes well with {drink}.

At {place} they make it with {grain}, and say that it is the only way.

If there is no {grain} in the house, borrow some.

Try it once as written before you improve it.
""")


def saying(dice: Dice, length: int) -> str:
    """Return one sentence to remember or one notice from the board, whatever the length."""
    notices = 0.5 if length < 70 else 0.8
    return dice.fill(dice.draw(NOTICES), person(dice)) if dice.chance(notices) else dice.draw(SAYINGS)


def postcard(dice: Dice, length: int) -> str:
    """Return a card from a journey, or a long letter in paragraphs."""
    bound = person(dice) | {"other": person(dice)["name"]}
    head, tail = dice.fill(dice.draw(GREETINGS), bound), dice.fill(dice.draw(FAREWELLS), bound)
    sights = endless(lambda: dice.fill(dice.draw(SIGHTS), bound))
    if length < 800:
        return f"{head}\n{grow(sights, length - 130, ' ')}\n{tail}"
    paragraphs = endless(lambda: grow(sights, dice.between(200, 450), " "))
    return "\n\n".join((head, grow(paragraphs, length - 350, "\n\n"), tail))


def _recipe(dice: Dice) -> Iterator[str]:
    head, *steps = dice.draw(RECIPES)
    bound = person(dice)
    title, *ingredients = dice.fill(head, bound).split("|")
    yield title + "\n\n" + "\n".join(f"- {ingredient}" for ingredient in ingredients)
    yield "\n".join(f"{number}. {dice.fill(step, bound)}" for number, step in enumerate(steps, 1))
    yield dice.fill(dice.draw(TIPS), bound)


def recipe(dice: Dice, length: int) -> str:
    """Return one recipe, or a small cookbook."""
    book = endless(lambda: "\n\n".join(_recipe(dice)))
    if length < 1_200:
        return next(book)
    return dice.fill("From the kitchen at {place}\n\n") + grow(book, length - 250, "\n\n* * *\n\n")
