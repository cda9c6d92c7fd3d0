"""The vocabulary that prose and dialogue share: slot name -> what may stand there."""

from demo_corpus.dice import Dice, words

WOMEN = words("""Ada, Chloé, Dimitra, Freya, Hana, Inès, Käthe, Mirela, Petra, Rosa, Uma, Vera, Yuki, Zoë, Agnes,
    Lotte, Marit, Nadia, Ottilie, Sunniva, Thandi, Wilhelmina, Eleni, Beatriz""")
MEN = words("""Ben, Emil, Günther, Jonas, Léon, Nils, Oskar, Quentin, Søren, Tomás, Wim, Anselm, Caspar, Dario,
    Florian, Gábor, Henrik, Ivo, Jürgen, Konrad, Matteo, Pavel, Ravi, Stavros""")

VOCABULARY = {
    "someone": words("""the ferryman, the postwoman, the schoolteacher, the blacksmith's daughter, the beekeeper,
        the old cooper, the baker's boy, the lock keeper, a passing tinker, the surveyor, the organ builder,
        the shepherd, the night watchman, the seed merchant, the weaver's aunt, the carter, the midwife,
        the bell ringer, the innkeeper, the saddler, a student of hydraulics, the sexton"""),
    "place": words("""Alder Ford, Mühlbach, Saint-Orens, Lower Brackwater, Heron's Weir, Großenried,
        Vallée-des-Aulnes, Kalamós, Stony Ferry, Oxlip Hollow, Quince Hill, Teasel Bridge, Winterbourne Mill,
        Étang-le-Vieux, Thornlock, Birch Bridge, Saltmarsh End, Three Sluices, Pebble Quay, Harrow Down"""),
    "river": words("""the Alder, the Mühlbach, the Little Orens, the Teasel, the Brackwater, the Winterbourne,
        the Heron, the Ried, the Oxlip brook, the Vallière"""),
    "grain": words("rye, wheat, spelt, barley, oats, buckwheat, maize, millet, emmer, einkorn, winter rye"),
    "weather": words("""a thin drizzle, low fog, a dry east wind, bright frost, warm rain, sleet, a hazy calm,
        broken cloud, a sharp hail shower, heavy dew, a gusty wind, soft snow, long sunshine, a warm haze"""),
    "season": words("""early spring, late spring, midsummer, hay time, harvest time, early autumn, late autumn,
        deep winter, midwinter, Lent, apple time"""),
    "daytime": words("""before sunrise, at first light, after breakfast, around noon, in the slow hour after lunch,
        towards evening, at dusk, by lantern light, at four o'clock, just before supper"""),
    "bird": words("""a heron, a wagtail, two swans, a kingfisher, a dipper, a barn owl, a flock of starlings,
        a wren, three magpies, a moorhen, the first swallow, a grey goose"""),
    "tree": words("alder, willow, ash, hazel, walnut, lime, hornbeam, poplar, elder, pear, cherry, oak, larch"),
    "colour": words("""pale green, slate grey, ochre, rust red, ink blue, honey yellow, chalk white, moss green,
        copper, plum, straw yellow, charcoal"""),
    "leaf": words("yellow, russet, bronze, crimson, bright green, pale gold"),
    "material": words("""oak, brass, leather, cast iron, hemp, linen, copper, slate, beeswax, felt, boxwood, horn,
        sandstone, willow wicker, glazed clay, tin"""),
    "metal": words("brass, cast iron, copper, tin, bronze, blue steel"),
    "thread": words("hemp, linen, red wool, waxed cotton, horsehair, green silk, raffia"),
    "adverb": words("""slowly, carefully, patiently, quietly, cheerfully, without hurry, with great care,
        half asleep, stubbornly, methodically, gently, with a steady hand"""),
    "food": words("""barley soup, rye bread, hard cheese, baked apples, onion tart, lentil stew, plum cake,
        crêpes, pickled beans, potato dumplings, roast chestnuts, buckwheat porridge, quince jelly,
        smoked trout"""),
    "drink": words("mint tea, cider, buttermilk, elderflower water, strong coffee, barley broth, warm milk, perry"),
    "few": words("two, three, four, five, half a dozen, seven, eight"),
    "number": words("two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"),
    "month": words("""January, February, March, April, May, June, July, August, September, October, November,
        December"""),
    "weekday": words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "sound": words("""a low hum, a dry creak, a steady clatter, a hollow knock, a soft hiss, a long sigh,
        a clear ring, a patient tick, a gurgle, a rasp"""),
    "smell": words("""warm flour, wet rope, cut hay, tallow, sawdust, river mud, woodsmoke, fresh paint,
        old leather, cloves, rain on stone, hot iron, apple peel, linseed oil"""),
    "thing": words("""a lantern, a brass compass, a coil of rope, a spare bootlace, a notebook, a paper of pins,
        a folding rule, a tin whistle, a jar of nails, a spirit level, a sailmaker's needle, a hand bell,
        a bundle of willow rods, a pair of dividers, a pot of glue, an umbrella, a pencil stub,
        a magnifying glass"""),
    "adjective": words("""narrow, crooked, patient, weathered, heavy, generous, stubborn, shallow, quiet, steep,
        worn, handsome, useful, peculiar, modest, hollow, polished, tidy, ancient, delicate"""),
}


def person(dice: Dice, prefix: str = "") -> dict[str, str]:
    """Bind a name and its pronouns: `name`, `they`, `them`, `their`, each after the prefix."""
    name, they, them, their = (
        (dice.draw(WOMEN), "she", "her", "her") if dice.chance(0.5) else (dice.draw(MEN), "he", "him", "his")
    )
    return {f"{prefix}name": name, f"{prefix}they": they, f"{prefix}them": them, f"{prefix}their": their}
