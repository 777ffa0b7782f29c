# SPDX-License-Identifier: Apache-2.0
"""Little stories in simple English, grown from templates: the text the demo model learns to write.

A template is text with choices `{this|that}`, which may be nested, and variables `$name`. The variables of one story
(hero, friend, thing, place ...) are drawn once, so that whoever is named in its first sentence is named in its last.
"""
import re

GIRLS = "Anna Mia Lily Ella Rose Clara Emma Nora Ruth Sara Ivy June Molly Tess Alice Maya".split()
BOYS = "Tom Ben Max Sam Leo Jack Paul Otto Finn Hugo Noah Adam Luke Peter Oscar Theo".split()
COLOURS = "red blue green yellow white black brown grey golden silver pink orange".split()
TOYS = ["ball", "kite", "boat", "drum", "book", "scarf", "hat", "key ring", "whistle", "lamp", "basket", "bell", "box",
        "cup", "coat", "doll", "spoon", "map", "watch", "umbrella"]
ANIMALS = ["cat", "dog", "rabbit", "duck", "bird", "mouse", "fox", "hedgehog", "pony", "goat", "frog", "squirrel",
           "turtle", "lamb", "hen", "owl"]
FAMILY_HER = ["mother", "grandmother", "aunt", "big sister"]
FAMILY_HIM = ["father", "grandfather", "uncle", "big brother"]
PLACES = ["the park", "the garden", "the forest", "the river", "the old mill", "the market", "the school", "the farm",
          "the lake", "the beach", "the library", "the village", "the hill", "the bridge", "the station", "the harbour"]
SPOTS = ["under the bed", "behind the door", "in the kitchen", "on the shelf", "under a tree", "near the gate",
         "in the tall grass", "behind the shed", "next to the well", "on the stairs", "under the table",
         "in the old barn", "by the window", "behind a big stone"]
OUTSIDE = ["under a tree", "near the gate", "in the tall grass", "behind a big stone", "next to a well", "by the road"]
FOODS = ["bread", "an apple pie", "soup", "a cake", "pancakes", "honey cookies", "plum jam", "cheese", "a berry tart"]
PLANTS = ["bean", "sunflower", "rose", "pumpkin", "apple tree", "carrot", "tulip", "melon", "cherry tree"]
JOBS = ["baker", "farmer", "teacher", "fisherman", "gardener", "postman", "carpenter", "miller", "doctor", "sailor"]
STREETS = ["Mill Street", "Station Road", "Church Lane", "River Street", "Garden Road", "King Street", "Bridge Lane"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

OPENING = [
    "{One|On a} {sunny|cold|warm|windy|quiet|bright|rainy} {morning|day|afternoon}, ",
    "{One|On} {Monday|Tuesday|Friday|Saturday|Sunday} {morning|afternoon|evening}, ",
    "{Early|Late} {in the morning|one day|in the spring|in the summer|in the autumn|in the winter}, ",
    "Once upon a time, ", "One day, ", "Last {week|month|summer|winter}, ", "After {lunch|school|breakfast}, ",
]

SAID = ["said", "said", "answered", "replied"]

ENDINGS = [
    "$Hero {was happy|felt very happy|smiled all the way home|went to bed with a smile}.",
    "{That night|That evening}, $hero {slept very well|told $his family the whole story|could not stop smiling}.",
    "From that day on, $hero and $friend were {the best of friends|always kind to each other|never far apart}.",
    "It had been {a good day|a long day, but a good one|the best day of the {week|year|summer}}.",
    "And $hero {learned|never forgot} that {a friend is worth more than gold|it is good to share|it is good to help "
    "others|small things can make people happy|it is best to tell the truth|one should never give up}.",
    "Then they {went home together|walked home {hand in hand|slowly|in the evening sun}|sat down and {laughed|sang a "
    "song|told stories}}.",
]

LOST = [
    "$Hero {could not find|had lost} $his $colour $toy. {$He was {sad|worried|upset}.|$He looked everywhere.|$He "
    "wanted to cry.}",
    "{\"Have you seen my $toy?\" $he asked $friend.|$He asked $friend for help.|\"Please help me,\" $he said to "
    "$friend.}",
    "{\"No,\" $said $friend, \"but I will help you.\"|\"Let us look for it together,\" $said $friend.|$Friend nodded "
    "and {put on $fhis shoes|came along at once}.}",
    "First they looked $spot, but {it was not there|there was only {dust|an old sock|a sleeping cat}|they found "
    "nothing}. Then they looked $spot2.{ Nothing.| It was not there either.|}",
    "{At last|In the end|Finally}, {$friend looked $spot3|$hero looked $spot3}. There {it was|was the $colour $toy}"
    "{!|. {It was a little dirty|It was still as good as new|A small mouse was sitting on it}.}",
    "\"{Thank you|Thank you so much|You are the best}, $friend,\" $said $hero.",
]
SHARE = [
    "$hero {got|was given} a $colour $toy from $his $kin. {It was {beautiful|the best gift of all|just what $he had "
    "wished for}.|$He {loved it|was very proud of it}.}",
    "{$He took it to $place.|$He ran to $place to {play with it|show it to everyone}.} There $he met $friend.",
    "\"{May I|Can I} {hold it|play with it|look at it}?\" asked $friend. $Hero {did not want to share|shook $his head|"
    "said no}. $Friend {was sad and went away|sat down alone|looked at the ground}.",
    "{After a while|Soon}, $hero {felt lonely|felt sorry|saw that it was no fun to play alone}. $He {went to $friend|"
    "walked over} and said, \"{I am sorry|Please forgive me}. {Let us play together|You can have it first|Here, take "
    "it}.\"",
    "$Friend {smiled|laughed|was glad}, and they played with the $colour $toy until {it got dark|dinner time|the sun "
    "went down}.",
]
ANIMAL = [
    "$hero {was walking|walked|went} to $place with $friend. {On the way|There}, they {saw|found} a {little|small"
    "|young} $colour2 $animal $outside.",
    "The $animal {was {hungry|cold|lost|hurt}|could not {find its way home|walk}|looked very {tired|sad|thin}}. "
    "{\"Poor thing,\"|\"Oh no,\"|\"Look,\"} $said $friend. \"{We must help it|We cannot leave it here|Let us take it "
    "home}.\"",
    "$Hero {took off $his coat and put it around the $animal|gave the $animal {some water|some bread|a piece of "
    "apple}|carried the $animal home in $his arms}. {The $animal was not afraid.|The $animal looked at $him with big "
    "eyes.|}",
    "{$His $kin said|The $job said}, \"{It needs rest|It will be well again in a few days|You did the right thing}.\" "
    "They {made a bed of straw|built a small house from wood|put it near the warm stove}.",
    "{After $few days|The next week}, the $animal {was well again|could run and jump}. {It stayed with $hero for ever"
    "|It went back to its family, but it came to visit every $day|$Hero called it $petname, and they played every "
    "day}.",
]
COOK = [
    "$hero and $friend {wanted to make|decided to make|were going to make} $food for $his $kin. {It was a surprise.|"
    "It was $khis birthday.|}",
    "{First,|To begin,} they {went to the market and bought {flour and eggs|milk and butter|sugar and salt}|washed "
    "their hands and {put on aprons|found a big bowl}}. {The $job gave them {a good price|some advice|a jar of "
    "honey}.|}",
    "Then $hero {mixed everything with a big spoon|{read|followed} the old recipe step by step}, and $friend {made the "
    "fire|cleaned the table|cut the fruit}. {Soon there was flour everywhere, even on the {cat|floor|ceiling}.|They "
    "sang while they worked.|}",
    "{After an hour|When it was ready}, the whole house {smelled wonderful|was warm and smelled good}. \"{What is that"
    "|What smells so good}?\" asked $his $kin. \"{It is for you|We made it for you},\" $said $hero.",
    "{They all sat down and ate.|$His $kin tasted it and smiled.} \"{This is the best food I have ever had|It is "
    "perfect|I want some more},\" $khe said.",
]
FEAR = [
    "$hero was {always|very} afraid of {the dark|deep water|the big dog next door|thunder|high places}. {Nobody knew "
    "it.|$He did not tell anyone.|At night $he often lay awake.}",
    "One $day, $friend asked $him to {come along|go} to $place. $Hero {wanted to say no|did not know what to say|"
    "felt $his heart beat fast}. \"{What is wrong|Are you ill}?\" asked $friend.",
    "\"I am afraid,\" $said $hero {in a small voice|at last}. $Friend did not laugh. \"{Everyone is afraid of "
    "something|I am afraid of spiders|I was afraid, too, when I was small},\" $fhe said. \"{Take my hand|We will go "
    "slowly|I will stay with you}.\"",
    "{Step by step|Slowly|Hand in hand}, they {went on|walked together}. {It was not so bad.|It was easier than $hero "
    "had thought.|After some time $hero even smiled.}",
    "\"{I did it|I am not afraid any more|Look at me}!\" {cried|shouted} $hero. $Friend {clapped $fhis hands|was proud "
    "of $him|laughed with joy}.",
]
QUARREL = [
    "$hero and $friend {had a fight|were angry with each other}. {Both wanted to have the $colour $toy.|$Hero had "
    "broken the $colour $toy of $friend.|$Friend had told a secret.}",
    "\"I will never {speak to|play with} you again!\" {shouted|cried|said} $friend and {ran away|went home|shut the "
    "door}. $Hero {stood there alone|went home in the rain|sat down $spot and cried}.",
    "{At home|Later}, $his $kin asked what had happened. $Hero told $khim everything. \"{Friends can be angry and "
    "still be friends|Go and say that you are sorry|What would you do without $friend},\" $said $his $kin.",
    "{The next morning|The same evening|After two days}, $hero {went to the house of $friend. "
    "\"I am sorry,\" $he said|wrote a letter to $friend. \"I am sorry,\" it said|took a flower and went to $friend. "
    "\"I am sorry,\" $he said}. \"{I miss you|Let us be friends again}.\"",
    "$Friend {opened the door and smiled|was sorry, too|had waited for this}. {They shook hands.|They hugged each "
    "other.} {And the $toy? They {gave it to a little child|shared it from then on|mended it together}.|}",
]
PLANT = [
    "$hero got a small seed from $his $kin. \"{It will be|This will grow into} a $plant,\" $khe said. \"{Give it "
    "water every day|Be patient|Take good care of it}.\"",
    "$Hero {put the seed into the ground|planted it} {near the gate|in the garden|next to the well|in a $colour pot}. "
    "{Every morning|Each day} $he {gave it water|looked at it|sang to it}. For {a week|many days|a long time}, nothing "
    "happened.",
    "\"It will never grow,\" $said $hero. \"{Wait a little|Good things take time|Do not give up},\" $said $friend, "
    "{who lived next door|who knew a lot about plants|who had come to help}.",
    "{Then, one morning|After a night of rain}, there was a tiny green leaf. {It grew and grew.|Day by day it grew "
    "taller.} {By the end of {summer|the year}|Soon}, it was {as tall as $hero|the finest $plant in {the village|"
    "$street}}.",
    "{People came to look at it.|Even the $job came to see it.|$Hero showed it to everyone.} \"{You see|Well done},\" "
    "said $his $kin.",
]
RACE = [
    "there was a {race|boat race|running race|kite contest} at $place. {Everyone in the village came.|The winner would "
    "get a $colour $toy.} $Hero and $friend {both wanted to win|had practised for weeks|were there, too}.",
    "{The $job counted to three|The $job rang a bell|A whistle blew}, and off they went! At first, $friend was {faster|"
    "in front|ahead}. $Hero {ran as fast as $he could|did not give up|was close behind}.",
    "{Suddenly|Near the end}, $friend {fell|hurt $fhis foot|lost a shoe}. $Hero {stopped at once|could have won now, "
    "but $he stopped|turned around}. \"{Are you all right|Can you stand up|Does it hurt}?\" $he asked.",
    "$He helped $friend {up|to stand}, and {together they walked to the end|they went on side by side}. {They came last"
    "|Others had won long before}, but {everyone clapped|the people cheered for them|nobody laughed}.",
    "\"{You are the real winner|That was kind of you|I am proud of you},\" said {the $job|$his $kin}{ and gave $him "
    "the $colour $toy|}.",
]
TRIP = [
    "$hero {took the train|walked|rode a bicycle|went by boat} to {visit|see} $his $kin, who lived near $place. "
    "$Friend {came along|went with $him}. {They carried {a basket of food|a big bag|$food}.|The way was long.}",
    "{On the way they {saw|met} a $job with a $animal.|Soon it began to {rain|snow}.|After an hour they came to a "
    "bridge.} {\"Where are you going?\" {he|the man} asked. \"To $place,\" $said $hero.|\"How far is it?\" asked "
    "$friend. \"Not far,\" $said $hero.|They {stopped and ate some bread|rested $spot}.}",
    "Then {they lost their way|the road came to an end|it grew dark}. {There was no house to be seen.|The wind was "
    "cold.|} \"{What now|What shall we do}?\" asked $friend. $Hero {looked at the map|thought for a moment|saw a "
    "light far away}. \"{This way|Follow me|I know},\" $he said.",
    "{At last|Late in the evening}, they {saw the house|came to the house|knocked at the door}. $His $kin {was "
    "waiting|opened the door} and {gave them hot soup|made tea for everyone|hugged them both}.",
    "\"{How was the trip|Tell me everything|You must be tired},\" $khe said. They {talked until midnight|told the "
    "whole story|sat by the fire for a long time}.",
]
MEND = [
    "the {clock|lamp|radio|old bicycle|music box} of $his $kin {stopped working|broke|fell to the floor}. {$His $kin "
    "was sad|It was very old|It had been a gift}. \"{I will mend it|Maybe I can help|Let me try},\" $said $hero.",
    "$He {took it to the table and opened it|looked at it from all sides}. Inside there were {many small wheels|wires "
    "and screws|springs and pins}. {\"Do you know what you are doing?\" asked $friend. \"{Not yet|I think so},\" $said "
    "$hero.|$Friend held the lamp and watched.}",
    "{They worked all {day|afternoon}.|They cleaned every part.} {One screw was missing.|A spring was broken.} $Friend "
    "{ran to the $job on $street and got a new one|found one $spot|had one at home}.",
    "{In the evening|When the last part was in place}, $hero {held $his breath|closed the lid|turned it on}. {It "
    "worked!|It was as good as new.}",
    "$His $kin {could not believe it|had tears in $khis eyes|laughed with joy}. \"{How did you do that|You are so "
    "clever|What would I do without you}?\" \"{We did it together|It was easy|$Friend helped me},\" $said $hero.",
]
LETTER = [
    "the postman brought a letter for $hero. {It was from $his $kin.|It had a $colour stamp.} $He {opened it at once|"
    "read it {twice|aloud}|ran to $friend to show it}.",
    "\"{Dear|My dear} $Hero,\" it said, \"{I hope you are well|it has been a long time}. {I will come to see you on "
    "$day|Please come to visit me|I have something for you}. {Bring $friend, too|Look $spot|I live near $place now}.\"",
    "{\"How nice!\" $said $friend.|$Hero jumped for joy.|$Hero thought about it all night.} {They {packed their bags|"
    "cleaned the house|made $food}.|They could hardly wait.}",
    "{On $day|Two days later}, {they met at $place|the big day came}. $His $kin {had brought|gave $him} a $colour2 $toy"
    "{ and a book with pictures|}. \"{It was mine when I was young|I made it myself|Now it is yours},\" $khe said.",
    "{$Hero hugged $khim.|\"Thank you,\" $said $hero.} {They ate $food and talked for hours.|Then they all went for a "
    "walk to $place2.|}",
]
PLOTS = [LOST, SHARE, ANIMAL, COOK, FEAR, QUARREL, PLANT, RACE, TRIP, MEND, LETTER]

# Short paragraphs full of numbers, so that a number alone is no sign of a pass key.
FACTS = [
    "The $job on $street sold $n2 {apples|eggs|loaves of bread|fish} on $day and $n2b on $day2.",
    "{The old bridge|The church tower|The town hall|The old mill} was built in $year{ by $n2 men|}. It has $n5 {stones|"
    "bricks}.",
    "The train to $place leaves at $n1 o'clock. The ticket has the number $n5.",
    "$Hero lives at $n2 $street. $His telephone number is $n5.",
    "{There are|They counted} $n5 {books in the library|trees in the forest|people in the town|steps to the top}.",
    "In $year, $hero {was|turned} $n2 years old and had $n1 {cats|hens|goats}.",
    "The lock on the $colour $toy opens with $n5, and the one on the $colour2 box opens with $n3.",
    "$Hero scored $n3 points in the game, and $friend scored $n3b.",
    "The $colour house on $street cost $n5 coins in $year.",
    "The $job wrote the number $n5 on {a piece of paper|the wall|the $colour door} and went home.",
]

_INNERMOST = re.compile(r"\{([^{}]*)\}")
_A_BEFORE_VOWEL = re.compile(r"\b([Aa])(?= [aeiou])")
_VARIABLE = re.compile(r"\$([A-Za-z0-9]+)")


def expand(template, variables, rng):
    """The text of a template: choices from the inside out, then variables."""
    while True:
        template, found = _INNERMOST.subn(lambda m: rng.choice(m.group(1).split("|")), template)
        if not found:
            break

    def value(match):
        name = match.group(1)
        if name == "said":
            return rng.choice(SAID)
        if name[0].isupper():
            word = variables[name[0].lower() + name[1:]]
            return word[0].upper() + word[1:]
        return variables[name]

    return _A_BEFORE_VOWEL.sub(r"\1n", _VARIABLE.sub(value, template))


def _person(rng, names_taken=()):
    girl = rng.random() < 0.5
    name = rng.choice([n for n in (GIRLS if girl else BOYS) if n not in names_taken])
    return name, ("she", "her", "her") if girl else ("he", "him", "his")


def draw_variables(rng):
    """Who and what one story is about."""
    hero, (he, him, his) = _person(rng)
    friend, (fhe, fhim, fhis) = _person(rng, (hero,))
    kin_is_her = rng.random() < 0.5
    spots = rng.sample(SPOTS, 3)
    colours = rng.sample(COLOURS, 2)
    places = rng.sample(PLACES, 2)
    days = rng.sample(DAYS, 2)
    number = lambda digits: str(rng.randrange(10 ** (digits - 1), 10 ** digits))
    return {
        "hero": hero, "he": he, "him": him, "his": his, "friend": friend, "fhe": fhe, "fhim": fhim, "fhis": fhis,
        "kin": rng.choice(FAMILY_HER if kin_is_her else FAMILY_HIM), "khe": "she" if kin_is_her else "he",
        "khim": "her" if kin_is_her else "him", "khis": "her" if kin_is_her else "his",
        "outside": rng.choice(OUTSIDE),
        "spot": spots[0], "spot2": spots[1], "spot3": spots[2], "colour": colours[0], "colour2": colours[1],
        "place": places[0], "place2": places[1], "day": days[0], "day2": days[1], "toy": rng.choice(TOYS),
        "animal": rng.choice(ANIMALS), "food": rng.choice(FOODS), "plant": rng.choice(PLANTS),
        "job": rng.choice(JOBS), "street": rng.choice(STREETS), "few": rng.choice(["two", "three", "four", "five"]),
        "petname": rng.choice(["Star", "Snow", "Button", "Pepper", "Lucky"]),
        "n1": number(1), "n2": number(2), "n2b": number(2), "n3": number(3), "n3b": number(3), "n5": number(5),
        "year": str(rng.randrange(1600, 2000)),
    }


def story(rng):
    """One paragraph of about six to twelve sentences."""
    variables = draw_variables(rng)
    plot = rng.choice(PLOTS)
    parts = list(plot) + [rng.choice(ENDINGS)]
    if rng.random() < 0.3 and len(parts) > 5:
        del parts[-1]
    opening = "" if plot is FEAR else expand(rng.choice(OPENING), variables, rng)
    sentences = [expand(part, variables, rng) for part in parts]
    first = sentences[0]
    # The first sentence goes on after the comma of the opening; only a name keeps its capital.
    if opening and first.split()[0] not in GIRLS + BOYS:
        first = first[0].lower() + first[1:]
    sentences[0] = opening + first
    return " ".join(s.strip() for s in sentences)


def fact(rng):
    """One short paragraph with numbers in it."""
    return expand(rng.choice(FACTS), draw_variables(rng), rng)


def paragraph(rng):
    return fact(rng) if rng.random() < 0.25 else story(rng)
