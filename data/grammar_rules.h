/* grammar_rules.h - the tables that the built-in stories are told from; grammar.c tells them.
 *
 * A rule has a name, names for its further columns, and rows. Telling a rule draws one row and tells it.
 *
 *     2 red|blue                a row for each |; a number is its weight, 1 where there is none
 *     Lily/she/her              a row's columns, where the rule has more than one
 *
 * Inside a row, everything is told as it stands but these:
 *
 *     {color}                   a row of the rule "color"
 *     {red|2 blue|{color}}      a choice made on the spot: a rule without a name
 *     {hue=color} {w=cap|hat}   a row drawn and kept: {hue} tells it again later
 *     {let hero=child}          kept, but not told yet
 *     {friend=hero}             another row of the rule that {hero} came from
 *     {friend.he} {he}          a column of the row that is kept as friend; without a name, of the hero's
 *     {He} {Color}              the same with a capital letter
 *     {a} {color}               "a", or "an" where a vowel follows the space
 *     < >                       quotation marks
 *
 * A row that is kept under one name is never drawn under another one: two characters differ, and so do two
 * colors that are both kept. Sentences that many stories share keep their own things as {this} and {that}, so
 * that they never take a name from the story around them.
 *
 * To change a story, keep to two habits. Rows of a choice begin differently or differ soon, in whatever
 * follows, so that the choices can be read back from the text: the test reads back 100,000 stories and says
 * where it could not. And what varies, varies by words that many stories share (colors, creatures, food,
 * places), so that a small model can learn all of it from a few megabytes. */
#ifndef GRAMMAR_RULES_H
#define GRAMMAR_RULES_H

typedef struct GrammarRule {
    const char *name, *columns, *rows;
} GrammarRule;

#define HER "/she/her/her"
#define HIM "/he/him/his"
#define GIRL(name) name HER "/herself/girl/" name
#define BOY(name) name HIM "/himself/boy/" name
#define SHE(name, kind) name HER "/herself/" kind "/" name " the " kind
#define HE(name, kind) name HIM "/himself/" kind "/" name " the " kind

/* clang-format off */
static const GrammarRule grammar_rules[] = {

/* ---- a story: who, then what happened ---- */
{"story", "",
 "5 {let hero=child}{opening}\n{5 {plot}|2 {child_plot}}"
 "|3 {let hero=animal}{opening}\n{{plot}|{animal_plot}}"},

{"opening", "",
 "4 {3 Once|2 Long ago|2 Once upon a time|One {weather} {season}}, {a} {nature} {kind} {named|called} "
 "{hero} lived {where}{2 |2  with {his} {nature} {family}| with {creature}}. {about}"
 "|2 {hero} was {a} {nature} {kind} who lived {where}. {about}"
 "|2 {Where} lived {a} {nature} {kind} {named|called} {hero}. {about}"
 "|This is {a|the} story of {hero}, {a} {this=nature}, {that=nature} {kind}. {about}"},

{"about", "", "4 {trait}|3 {trait} {habit}"},

{"trait", "",
 "{He} {liked} {food}, {color} {things} and {hobby}."
 "|{He} {liked} {this=hobby} and {that=hobby} {where}."
 "|In {his} {color} bag {he} {kept} {some_things}, {some_food} and {a_thing}."
 "|{Hero_or_he} {2 always|2 often|never} wore {a} {look} {color} {this=clothing} and {a} {color} "
 "{that=clothing}."
 "|{His} best friends were {creature} and {creature} {where}."
 "|{He} {kept|hid} {a_thing} from {person} {indoors}."},
{"habit", "",
 "2 Every {weekday}, {hero_or_he} {walked} {path}{ with {a_thing}| with {creature}|}."
 "|2 {On {weekday}s|Each {part}}, {hero_or_he} {brought} {some_food} {where}."
 "|{Creature} and {creature} lived {there too|{where}}."},
{"liked", "", "4 liked|4 loved|2 dreamed of|2 talked about|sang of"},
{"kept", "", "2 kept|2 carried|2 hid|found"},

/* ---- characters ---- */
{"child", "he him his himself kind full",
 "3 " GIRL("Lily") "|3 " GIRL("Mia") "|3 " GIRL("Anna") "|2 " GIRL("Rosie") "|2 " GIRL("Nora")
 "|2 " GIRL("Ella") "|2 " GIRL("Zoe") "|2 " GIRL("Ruby") "|2 " GIRL("Ivy") "|2 " GIRL("Clara")
 "|" GIRL("Maya") "|" GIRL("June")
 "|3 " BOY("Tom") "|3 " BOY("Ben") "|3 " BOY("Max") "|2 " BOY("Leo") "|2 " BOY("Sam") "|2 " BOY("Finn")
 "|2 " BOY("Jack") "|2 " BOY("Theo") "|2 " BOY("Oscar") "|2 " BOY("Noah") "|" BOY("Eli") "|" BOY("Hugo")},
{"animal", "he him his himself kind full",
 "2 " HE("Pip", "rabbit") "|2 " HE("Bruno", "bear") "|2 " SHE("Hazel", "squirrel") "|2 " SHE("Fern", "fox")
 "|2 " HE("Nib", "mouse") "|2 " SHE("Dot", "hedgehog") "|2 " HE("Otto", "otter") "|2 " SHE("Clover", "lamb")
 "|2 " HE("Tuck", "turtle") "|2 " SHE("Juna", "deer") "|2 " HE("Bob", "badger") "|" SHE("Pearl", "mole")
 "|" SHE("Daisy", "goat") "|" HE("Hop", "frog")},
{"family", "he him his", "3 mom" HER "|3 dad" HIM "|2 grandma" HER "|2 grandpa" HIM},
{"friend_met", "", "{let friend=hero}{|2 {nature} }{friend.full}"},
{"villager", "",
 "2 baker|2 farmer|2 teacher|2 miller|2 cook|2 tailor|2 doctor|2 painter|sailor|gardener|mailman|shepherd"
 "|mayor|queen"},
{"person", "", "4 the {nature} {villager}|3 the {villager}|2 the {villager} in {a} {color} {clothing}"},

/* ---- what people and things are like, how many, and where ---- */
{"nature", "",
 "4 little|3 kind|3 shy|3 quiet|3 clever|3 brave|2 gentle|2 cheerful|2 sleepy|2 busy|2 lonely|2 proud"
 "|2 funny|2 hungry|2 young|2 grumpy|2 tired|2 wise|2 old|2 happy|2 lucky|2 cross"},
{"look", "",
 "3 little|3 old|3 small|3 big|3 new|2 tiny|2 round|2 shiny|2 funny|2 pretty|2 dusty|2 strange|2 plain"
 "|2 heavy|2 lovely|2 odd|2 nice|2 broken|2 bright|2 fine"},
{"color", "",
 "3 red|3 blue|3 green|3 yellow|2 white|2 purple|2 orange|2 pink|2 brown|2 silver|2 golden|2 gray|2 black"},
{"taste", "", "3 sweet|3 warm|2 fresh|2 cold|2 fine|2 soft|2 tasty|2 big|2 small"},
{"number", "", "4 two|4 three|3 four|3 five|2 six|2 seven|2 eight|2 nine|2 ten|eleven|twelve"},
{"thing", "",
 "3 ball|3 doll|3 drum|3 boat|3 lamp|2 bell|2 cup|2 box|2 book|2 key|2 ring|2 kite|2 fan|2 bag|2 pot"
 "|2 clock|2 train|2 sled|2 spoon|2 flag|2 horn|2 bowl|2 broom|2 rug|2 chair|2 basket|2 hat|2 jar|2 stone"},
{"clothing", "", "3 hat|3 scarf|2 coat|2 cap|2 cape|2 vest|2 shirt"},
{"things", "",
 "3 buttons|3 shells|3 stones|3 leaves|3 feathers|2 stamps|2 keys|2 beads|2 corks|2 bells|2 coins|2 stars"
 "|2 socks|2 cards|2 nails|2 seeds|2 roses|2 pins|2 sticks|2 bags|2 cups|2 rings|2 hats"},
{"food", "",
 "3 apples|3 plums|3 pears|3 nuts|3 buns|2 figs|2 grapes|2 pies|2 beans|2 peas|2 eggs|2 tarts|2 cakes"
 "|2 cookies|2 carrots|2 cherries|2 melons|2 rolls"},
{"animal_kind", "",
 "3 bee|3 owl|3 hen|3 duck|3 cat|2 ant|2 crow|2 toad|2 worm|2 moth|2 dog|2 pig|2 cow|2 goose|2 snail"
 "|2 beetle|2 robin|2 spider|2 swan|2 crab|2 bird|2 fox|2 mouse|2 frog|2 goat"},
{"place", "",
 "3 mill|3 bridge|3 pond|3 well|3 barn|2 shop|2 hill|2 gate|2 lake|2 school|2 church|2 farm|2 park|2 wood"
 "|2 river|2 cave|2 market|2 garden|2 inn|2 road|2 tower|2 house"},
{"place_like", "", "3 old|2 big|2 little|2 quiet|2 green|2 windy|2 pretty|2 sunny"},
{"by", "", "3 by|3 near|3 behind|3 beside|2 far from|2 close to|2 across from"},
{"where", "", "{by} the {place}|{by} the {place_like} {place}"},
{"furniture", "", "3 bed|2 box|2 chair|2 table|2 stove|2 clock|2 shelf|2 rug|2 basket|2 lamp|2 coat"},
{"indoors", "", "{3 under|3 behind|2 beside|near} the {3 {color}|{look}|{look} {color}} {furniture}"},
{"outdoors", "",
 "2 {where}"
 "|{under|behind|beside|near} {a} {2 {color}|{look}} {bush|bench|rock|wall|tree|fence}"},
{"hobby", "",
 "3 singing|3 painting|2 climbing|2 dancing|2 fishing|2 telling stories|2 counting stars|2 baking|2 reading"
 "|2 digging|2 sailing|2 swimming|2 feeding ducks|4 finding {things}"},

{"creature", "", "{a} {3 {nature}|2 {nature} {color}|{color}} {animal_kind}"},
{"a_thing", "", "{a} {3 {look} {color}|2 {look}|2 {color}} {thing}"},
{"some_things", "",
 "{number} {3 {color}|{look}|{look} {color}} {things}"
 "|{number} {things}"
 "|{some|a few} {color} {things}"},
{"bites", "", "2 {number} {taste} {food}|2 {number} {food}|{some|a few} {taste} {food}"},
{"some_food", "", "5 {bites}|{a} {2 {color}|{look}} {bag|bowl|box} of {food}"},
{"smell", "", "2 rain|2 mint|2 honey|2 hay|2 smoke|2 {taste} {food}|3 {food}"},

/* ---- when ---- */
{"weather", "",
 "3 sunny|3 warm|2 bright|2 windy|2 cloudy|2 cool|2 clear|2 mild|2 golden|2 quiet|2 misty|2 hot"},
{"season", "", "spring|summer|fall|year"},
{"weekday", "", "Monday|Tuesday|Wednesday|Thursday|Friday|2 Saturday|2 Sunday"},
{"part", "", "3 morning|3 afternoon|2 evening"},
{"day", "", "3 One {weather} {part}|2 One {weather} {weekday}|2 On {weekday}|One {weekday} {part}"},
{"rain_day", "", "One {rainy|wet|gray|stormy} {part}|One {rainy|wet|gray|stormy} {weekday}"},
{"snow_day", "", "One {snowy|white|cold|icy} {part}|One {snowy|white|cold|icy} {weekday}"},
{"night", "", "3 One {dark|quiet|warm|windy|clear|cold|misty} night|2 On {weekday} night"},
{"later", "",
 "2 The next {2 day|morning|evening}|3 {Number} {days|weeks} later|2 On {weekday}|2 One {weather} {weekday}"},
{"then", "",
 "3 Then|2 After that|2 Soon|2 At last|2 Suddenly|2 Just then|2 Later|2 In the end|{Number} days later"},

/* ---- moving, feeling, talking ---- */
{"hero_or_he", "", "{hero}|2 {he}"},
{"walked", "",
 "{6 |quickly |slowly |quietly |bravely |softly |gladly }{3 walked|3 ran|2 hurried"
 "|2 went|2 skipped|2 marched|2 raced|2 hopped|2 danced}"},
{"path", "",
 "2 past the {place}|past the {this=place} and the {that=place}|past {creature}"
 "|around the {place_like} {place}|past {person}"},
{"took", "", "3 took|2 got|2 found|grabbed"},
{"put", "", "3 put|2 laid|2 set|left"},
{"gave", "", "3 gave|2 brought|2 handed"},
{"searched", "", "3 looked|2 searched|peeked"},
{"spotted", "", "4 found|2 saw|2 noticed"},
{"felt", "", "4 felt|3 was|2 looked|grew"},
{"glad", "", "3 happy|3 glad|3 proud|2 pleased|2 cheerful|2 lucky|2 warm|2 brave|2 strong|2 calm"},
{"joy", "", "{glad}|very {glad}|{this=glad} and {that=glad}|as {glad} as {creature}"},
{"sad", "",
 "3 sad|2 upset|2 lonely|2 gloomy|2 cross|2 small|2 tired|2 sorry|2 cold|as gray as {a} {animal_kind}"},
{"said", "", "4 said|3 whispered|2 answered|2 replied|2 called|2 added"},
{"cried", "", "4 cried|3 called|3 shouted|2 yelled|said"},
{"sighed", "", "3 sighed|3 said|2 whispered|2 cried"},
{"asked", "", "3 asked|2 whispered|2 called|2 said"},
{"aside", "",
 "2  at once|2  at last|2  with a nod|3  and {sat down|waited|nodded|sneezed|bowed}"
 "|2 , looking at {creature}|2 , holding {a_thing}|2 , eating {bites}"},
{"tail", "", "5 |2  softly|2  gently|2  slowly|2  kindly|2  quietly|2  with a smile|9 {aside}"},
{"loud_tail", "", "5 |2  loudly|2  quickly|2  twice|2  bravely|2  and jumped|2  and ran|7 {aside}"},
{"sad_tail", "", "5 |2  softly|2  slowly|2  sadly|2  quietly|7 {aside}"},
/* ... for whom a story calls hero, friend, adult and elder */
{"hero_said", "", "2 {said} {hero}{tail}|{hero} {said}{tail}"},
{"hero_cried", "", "2 {cried} {hero}{loud_tail}|{hero} {cried}{loud_tail}"},
{"hero_sighed", "", "2 {sighed} {hero}{sad_tail}|{hero} {sighed}{sad_tail}"},
{"hero_asked", "", "2 {asked} {hero}{tail}|{hero} {asked}{tail}"},
{"friend_said", "", "2 {said} {friend}{tail}|{friend} {said}{tail}"},
{"friend_cried", "", "2 {cried} {friend}{loud_tail}|{friend} {cried}{loud_tail}"},
{"friend_sighed", "", "2 {sighed} {friend}{sad_tail}|{friend} {sighed}{sad_tail}"},
{"friend_asked", "", "2 {asked} {friend}{tail}|{friend} {asked}{tail}"},
{"adult_said", "", "2 {said} {Adult}{tail}|{Adult} {said}{tail}"},
{"adult_asked", "", "2 {asked} {Adult}{tail}|{Adult} {asked}{tail}"},
{"elder_said", "", "2 {said} the {elder}{tail}|the {elder} {said}{tail}"},

/* ---- sentences that many stories share ---- */
{"grumble", "",
 "2 I give up|2 It is no use|2 I want to go home|2 I feel {sad}|2 I would rather eat {food}"
 "|Not even {creature} could do it|{Number} times I have tried|I need {a_thing}"},
{"cheer", "",
 "2 Hooray|2 Well done|2 Look at that|2 How {glad} I am|2 I could kiss {creature}|{Number} cheers"
 "|This is better than {food}"},
{"advice", "",
 "2 Have some {food} first|2 Wait for {weekday}|2 Think of {creature}|2 I was {sad} once too"
 "|2 Take {a_thing} with you|Ask {person}|It is not so bad"},
{"sat", "", "3 sat|2 slept|2 sang|2 waited|2 danced|2 stood|2 hummed"},
{"scenery", "",
 "2 {Creature} {sat} {where}, and {creature} {sat} {outdoors}."
 "|2 It smelled of {this=smell} and {that=smell}, and {creature} {sat} {where}."
 "|2 One cloud looked like {a_thing}, and one like {creature}."
 "|2 {Hero_or_he} {met|saw|passed} {creature}, {creature} and {creature}."
 "|{Where} {hero_or_he} {met|saw|passed} {person} with {a_thing} and {some_food}."},
{"parade", "",
 "2 {Creature} {brought} {some_food}, {creature} {brought} {a_thing}, and {person} {brought} {some_things}."
 "|2 {Person} came with {some_things}, and {creature} {brought} {some_food}."
 "|{First came|There was|There came} {creature} with {a_thing}, then {creature} with {some_food}."},
{"brought", "", "3 brought|2 carried|2 found|gave"},
{"meal", "",
 "{2 Then|Later|At home|In the end|Together} they {3 ate|2 shared|all had} {some_food} and {some_food} "
 "{with {creature}|{where}}."},
{"end_friends", "",
 "{2 From that day on|2 After that|2 Ever since|Since then}, {hero} and {friend} {met|played|sat|sang} "
 "{where} {every {weekday}|and talked about {hobby}|with {creature}|with {some_food}|with {some_things}}."},
{"end_night", "",
 "{2 That {night|evening}|On {weekday}}, {hero_or_he} {dreamed|sang|thought|talked} of {color} {things}, "
 "{color} {food} and {creature}."},

/* ---- plots for anyone ---- */
{"plot", "",
 "{lost}|{found}|{shared}|{built}|{race}|{thunder}|{nestling}|{seed}|{birthday}|{broken}|{quarrel}|{astray}"
 "|{newcomer}|{kitchen}|{snowman}|{picture}|{old_map}|{noise}|{sickbed}|{hiding}|{echo}|{hiccups}"
 "|{windy_hat}|{fireflies}|{little_boat}|{swaps}|{too_many}|{night_walk}"},

{"lost", "",
 "{day}, {hero} {could not find|had lost|wanted} {his} {look} {hue=color} {gone=thing}. {Hero_or_he} "
 "{searched} {indoors}, {indoors} and {indoors}. {He} asked {creature}, {creature} and {person}. "
 "<{Where did you have it last|What did you do on {weekday}}?> asked {his} {nature} {adult=family}{tail}. "
 "{hero} {thought of|remembered} {food}, {hobby} and {things}. {then} {hero_or_he} {walked} {path}.\n"
 "{There was the|There lay the} {gone}, {outdoors}, and {creature} {sat} on it. <{There you are|I missed "
 "you|{Cheer}}!> {hero_cried}. {Hero_or_he} {felt} {joy}. {end_night} The {gone} {sat} {indoors}."},

{"found", "",
 "{day}, {hero} {spotted} {a} {look} {hue=color} {find=thing} {outdoors}. {Who had lost it|Whose was it|Was "
 "it lost}? {Hero_or_he} asked {creature}, {creature} and {person}. <{It is not mine|I lost "
 "{some_things}|My {thing} is {color}},> {each of them|they all} {said|answered}. {scenery}\n"
 "{then} {hero_or_he} met the {nature} {elder=villager}, who {felt} {sad}. <{Is this your|Did you lose "
 "this|Do you know this} {find}?> {hero_asked}. <{My {find}|Yes, it is}! {It was my {family}'s|It was full "
 "of {things}|I had it for {number} years}.> The {elder} {gave} {him} {some_food} and {a_thing}. "
 "{Hero_or_he} {felt} {joy} and {walked} home {path}."},

{"shared", "",
 "{day}, {hero} {took} {number} {taste} {mine=food} and {some_food} and {walked} {path}. {scenery} {Where} "
 "sat {friend_met} and {felt} {sad}. <{what_is_it}?> {hero_asked}. <{{A} {animal_kind} ate|I lost|I forgot} "
 "my {food},> {friend_said}. {Hero_or_he} {put} half of the {mine} on {a} {look} {color} {plate|leaf|bowl} "
 "for {friend.him}.\n"
 "{later}, it {rained|snowed|stormed}. {friend} {walked} to {hero} with {a} {color} {clothing} and "
 "{a_thing}. <{Now it is my turn|This is for the {mine}},> {friend_said}. {meal} {end_friends}"},
{"what_is_it", "", "3 What is wrong|2 Why are you {sad}|2 Can I help|2 Did you lose {a_thing}"},

{"built", "",
 "{day}, {hero} and {friend_met} built {a} {look} {hue=color} {made=boat|tower|bridge|house|tent|cart} of "
 "{x=lumber}, {y=lumber} and {some_things} {where}. {then} {creature} sat on it, and it "
 "{fell|broke|was gone}. <{Grumble}!> {friend_cried}. <{Now we know more|We need {number} "
 "{lumber}|{Advice}},> {hero_said}.\n"
 "{parade} {later}, the {made} stood {where}. It was {now |}{v=color} and {w=color}, with {some_things} and "
 "{a_thing} on top. {end_friends}"},
{"lumber", "", "3 stones|2 logs|2 ropes|2 nails|2 sticks|2 doors|2 wheels|straw"},

{"race", "",
 "{day}, there was a race from the {x=place} to the {y=place}. {Creature}, {creature}, {person} and {hero} "
 "all ran for {a} {look} {hue=color} {prize=thing}. {hero} was first {path}. {then} {hero_or_he} saw "
 "{friend_met} {outdoors}, {with a bad foot|with one {color} shoe|who was {sad}}. <{Go on|Run|You will "
 "lose},> {friend_said}. <{I would rather help you|The {prize} can wait|Take my hand},> {hero_said}.\n"
 "{They were last, and|They lost, and|In the end} {creature} {won|got} the {prize}. {parade} {hero} {felt} "
 "{joy}. {end_friends}"},

{"thunder", "",
 "{night}, a {big |cold |loud |}storm {came|hurried|danced} over the {place_like} {place}. {hero} "
 "{lay|hid|sat} {indoors} with {his} {look} {color} {pet=thing} and {felt} {sad}. Boom! "
 "<{What was that|Is it angry}?> {hero_asked}. <{It is only|That was|I think it is} {rumble},> {said} {his} "
 "{nature} {adult=family}{tail}. Boom! <And that?> {hero_asked}. <{You tell me|Listen|Guess},> "
 "{adult_said}. <{Rumble}!> {hero_said}. Boom! <{Rumble}!> Boom! <{Rumble}!>\n"
 "They {ate|shared} {some_food} until {the storm was gone|{hero} slept|it was {weekday}}. {end_night}"},
{"rumble", "",
 "{creature} with {a_thing}"
 "|{number} {nature} {color} cows"
 "|{a} {nature} cloud with {a_thing}"
 "|the moon, eating {bites}"
 "|{person}, {singing|dancing|painting}"},

{"nestling", "",
 "{day}, {hero} {spotted} {a} {nature} baby bird {outdoors}. {Its nest was|Its house was|It had lived} in "
 "{a} {tree} {where}. {Hero_or_he} laid it in {a} {look} {hue=color} {bed=hat|scarf|sock|cup} and {walked} "
 "to {his} {nature} {adult=family}. <{Can we help it|What does it eat}?> {hero_asked}. <{Bring {a_thing}|It "
 "needs {some_food}|We will climb up},> {adult_said}. {parade}\n"
 "{Up they went|They went up|So up they went}. {Number} {nature} birds {sat} in the nest. "
 "<{Sleep well|Hold on|You are home},> {hero_said}. {Hero_or_he} {felt} {joy}. {later}, {the|{a} {color}} "
 "bird {flew|danced} over the {x=place} and the {y=place} with {a} {color} {leaf|feather|ribbon} in its "
 "beak. {end_night}"},
{"tree", "", "3 oak|3 apple tree|2 willow|2 pear tree|2 pine"},

{"seed", "",
 "{day}, the {nature} {elder=villager} gave {hero} {a} {look} {color} seed. <What will it be?> "
 "{hero_asked}. <{q=Wait and see|It will tell you|That is a secret},> {elder_said}. {Hero_or_he} {put} it "
 "in the ground {where} and {gave} it {some_food} every {weekday}. {Number} weeks {went by|came and went}, "
 "and {hero_or_he} {felt} {sad}.\n"
 "{then} there was {a} {look} green leaf! It grew as big as {a} {thing}, as {creature}, and as the {place}. "
 "It was {a} {big|strange|lovely|fine} {color} {melon|rose|pear tree|apple tree}! {parade} {hero} gave one "
 "of its seeds to {friend_met}. <What will it be?> {friend_asked}. <{q},> {hero_said}."},

{"birthday", "",
 "It was {hero}'s birthday, {and nobody said a word|but nobody said so|and it was {weekday}}. {His} "
 "{nature} {adult=family} {talked of|looked at} {food} and {things}. {Friend_met} {walked} by with {a} "
 "{look} {hue=color} {box=basket|bag|box} and did not {stop|wave}. {hero} {felt} {sad} and "
 "{sat|counted {things}} {outdoors}. {scenery}\n"
 "{then} {hero_or_he} {walked} home. <{Surprise|Happy birthday}!> {cried} {number} {nature} voices. "
 "{parade} In the {hue} {box} was {a_thing}. <{Did you think we forgot|Were you {sad}|Are you {glad}}?> "
 "{friend_asked}. <{Only a little|Not at all|Very},> {hero_said}. {meal}"},

{"broken", "",
 "{day}, {hero} {walked} past the {furniture} and broke {his} {adult=family}'s {look} {hue=color} "
 "{pot=bowl|cup|lamp|clock}. {Hero_or_he} hid the {number} pieces {indoors}. <{Where is|Who took|Did you "
 "see} my {pot}?> {adult_asked}. <{Maybe {creature} took it|I only saw {a_thing}|Ask "
 "{creature}},> {hero_said}. {Hero_or_he} {felt} {sad} and {could not eat|gave away} {his} {taste} {food}.\n"
 "That night {hero_or_he} brought the pieces. <{It was me|I broke it},> {hero_sighed}. "
 "<{It was only a {pot}|I once broke {a_thing}|Thank you for telling me},> {adult_said}. "
 "{Together they|They} made it whole with {v=color} and {w=color} {paint|glue}. {Hero_or_he} {felt} {joy}. "
 "Now {number} {look} {color} {things} live in the {pot}. {end_night}"},

{"quarrel", "",
 "{day}, {hero} and {friend_met} found {a} {look} {hue=color} {toy=thing} {outdoors}. <{It is mine|I saw it "
 "first|Give it to me}!> {hero_cried}. <{No, mine|I found it|You have {a_thing}}!> {friend_cried}. They "
 "{pulled|shouted|ran}, and it {broke|fell and broke}. {hero} {walked} home {path} and {felt} {sad}.\n"
 "<{Half a {toy} is no fun|{Grumble}},> {hero_or_he} told {his} {nature} {adult=family}. "
 "<{Who has the other half|A friend is more than a {toy}|Take {friend.him} {some_food}},> {adult_said}. "
 "{then} {hero} and {friend} met {where}. <{I am sorry|Be my friend again},> they both {said|cried}. They "
 "{made the {toy} whole|mended the {toy}} and painted it {v=color} and {w=color}. {hero} had it on "
 "{x=weekday}, {friend} on {y=weekday} and {creature} on {z=weekday}. {meal}"},

{"astray", "",
 "{day}, {hero} went to the market with {his} {nature} {adult=family}. {parade} {hero} looked at {a_thing} "
 "and at {creature}, {and {Adult} was gone!|and then {Adult} was gone!|but where was {Adult}?} {Hero_or_he} "
 "{felt} {sad}. But {hero_or_he} sat down {outdoors} and {sang|counted {things}|waited}.\n"
 "{Person} {gave} {him} {some_food}, and {creature} sat with {him}. {then} {Adult} {walked} {path}. "
 "<{There you are|I looked for you {where}}!> cried {Adult}{tail}. <{I stood still|I knew you would come|I "
 "had {some_food}},> {hero_said}. {Hero_or_he} {felt} {joy}. They got {some_things} and {a_thing} and "
 "{walked} home {path}."},

{"newcomer", "",
 "{day}, {friend_met} came to live in {a} {look} {color} house {where}. {friend} sat {indoors} all "
 "{day|week} and said {nothing|not a word}. <{How odd|How rude|How strange},> {said} {person}{tail}. <It is "
 "{hard|sad|lonely} to be new,> {hero_said}. {Hero_or_he} left {some_food} by the {color} door. {later}, "
 "{some_things} lay there. {hero} left {a_thing}. {later}, {some_food} lay there.\n"
 "{then} the door opened. <{Who are you|Is it you|Why are you so kind}?> {friend_asked}. "
 "<{I am {hero}|I live {where}|I like you},> {hero_said}. <Do you like {hobby}?> {friend} {smiled|nodded} "
 "and put on {a} {look} {color} {clothing}. {end_friends}"},

{"kitchen", "",
 "{day}, {hero} made {a} {look} {dish=cake|soup|pie} for {his} {nature} {adult=family}, who {felt} {sad}. "
 "{Hero_or_he} {took} {number} {taste} {x=food}, {number} {y=food}, {some_food} and {a} {look} {color} "
 "spoon. Soon there was {dish} {indoors} and on {creature}. {hero} {ate|had} a bit. <{Oh no|Oh dear|Help}! "
 "It is {all|full of} salt!> {hero_cried}.\n"
 "{Adult} {ate|had} a bit too. <{I like it|It is not so bad|I once put {things} in mine|{A} {animal_kind} "
 "will love it},> {adult_said}. They {sang|danced|talked} {indoors}. {Then they|Together "
 "they} made {dish} again with {taste} {x} and {taste} {z=food}. {parade} {hero} {felt} {joy}."},

{"snowman", "",
 "{snow_day}, {hero} put on {a} {look} {color} {x=clothing} and {a} {color} {y=clothing} and {walked} to "
 "{friend_met}. They {made|built} a snowman {where}, with {number} {eyes=things} and {a} {look} {hue=color} "
 "{z=clothing}. <{Who is he|What is his name}?> {friend_asked}. <Mr. {{weekday}|Snow|Button},> {hero_said}. "
 "{parade}\n"
 "{then} it was {warm|hot|spring}. The snowman was gone, and the {z} lay {outdoors} with the {eyes}. {hero} "
 "{felt} {sad}. <{Where is he|Will he come back}?> {hero_or_he} asked {his} {nature} {adult=family}. "
 "<{He is a cloud now|He is in the {place}|He will be back with the snow},> {adult_said}. They ate "
 "{some_food}, {hero} {put} the {z} {indoors}, and one {snowy|white|cold|icy} {weekday} he was back."},

{"picture", "",
 "{day}, {hero} painted {a_thing}, {creature} and {some_food} for {his} {nature} {adult=family}. {then} "
 "{creature} {sat} on the {furniture}, and {hue=color} paint {ran|went} over it all. <{Grumble}!> "
 "{hero_cried}, and hid it {indoors}. {Friend_met} found it and looked at it {from far away|with "
 "{a_thing}|from {indoors}}.\n"
 "<{It is|I see|That is} {a} {nature} {hue} {z=animal_kind},> {friend_said}. {It was|So it was}! {hero} "
 "gave it {number} legs, {a} {look} {color} {clothing} and {some_things}. {Adult} put the picture "
 "{indoors}. <{I like the {z} best|What {a} {nature} {z}|Nobody has {a} {z} like this},> {adult_said}. "
 "{hero} {felt} {joy}. {end_friends}"},

{"old_map", "",
 "{rain_day}, {hero} {spotted} {a} {look} {color} map {indoors}. <{Number} steps from the {x=place}, "
 "{number} from the {y=place},> it said. {hero} and {friend_met} {walked} {path} with {a_thing} and "
 "{some_food}. They dug, and {there was|found} {a} {look} {hue=color} {box=box|bag|pot}!\n"
 "In it were {some_things}, {a} {look} {toy=thing} and a letter: <{Take what you like|All this is "
 "yours|Take the {toy}}, but leave something for the next one.> It was from {hero}'s {adult=family}! <{I "
 "was little then|I forgot it|That was my {toy}},> {adult_said}. {hero} left {a_thing}, and {friend} left "
 "{some_things}. {meal}"},

{"noise", "",
 "{night}, {hero} {heard something|woke up|could not sleep}. {P=scratch|tap|bump|crunch}, {p}! Was it {a} "
 "{color} dragon with {a_thing}, or {a} {nature} giant, eating {food}? {P}, {p}! {Hero_or_he} {took} {a} "
 "{look} {color} {tool=lamp|broom|pot|spoon} and {walked} past the {furniture}. <Who is there?> "
 "{hero_asked}.\n"
 "{Indoors} sat {a} {nature} {color} {guest=cat|dog|pig|owl|duck}! <{You are no dragon|You are {sad} "
 "too|Come here},> {hero_said}. It got {some_food} and slept on {a} {look} {color} {clothing}. {later}, "
 "{his} {nature} {adult=family} found them both {indoors}. <{What is this|Who is that}?> {adult_asked}. "
 "<{The dragon|A small giant},> {hero_said}. The {guest} {liked} {food}, {things} and {hero}. {end_night}"},

{"sickbed", "",
 "{day}, {hero} and {friend_met} wanted to go {swimming|fishing|climbing|sailing} {where}. But {friend} was "
 "{sick|ill} in bed. {hero} {felt} {sad}. {then} {hero_or_he} {took} {a_thing} and {some_food} and {walked} "
 "{path} to {friend}'s house. <{Look out|Can you see me}!> {hero_cried}.\n"
 "First {he} was {creature} with {a_thing}. Then {he} was {creature}, eating {bites}. Then {he} was "
 "{person}, {dancing|singing} with {some_things}. {friend} {laughed|sat up|clapped} and {felt} {glad}. "
 "{later}, {friend} was well. <What {helped|was best}?> {hero_asked}. <{You did|The {animal_kind}|The "
 "{food}},> {friend_said}. {end_friends}"},

{"hiding", "",
 "{day}, {hero}, {friend_met}, {creature} and {creature} played hide and seek. {Hero_or_he} hid {outdoors} "
 "under {a} {look} {hue=color} {cloth=coat|rug|bag}. It smelled of {x=smell} and {y=smell}, and "
 "{hero_or_he} slept. {friend} {searched} {where}, {outdoors} and {outdoors}. {friend} found {some_things}, "
 "{a_thing} and {creature}, but where was {hero}?\n"
 "{Person} came with {a_thing}. <{Grumble},> {friend_sighed}. {then} {creature} sat on the {hue} {cloth}, "
 "and it {sneezed|jumped|cried}. <{Did I win|Is it {weekday}|Is it my turn}?> {hero_asked}. They felt "
 "{glad}. {meal} {end_night}"},

{"echo", "",
 "{day}, {hero} {walked} up the hill {where}. {scenery} <{p=Hello|Good day|Hey, you|I am {hero}}!> "
 "{hero_cried}. <{p}!> {cried} a voice. <{q=Who are you?|Where are you?|Stop that!|Go away!}> {hero_cried}. "
 "<{q}> {cried} the voice. {hero} {walked} home {path} and {felt} {sad}.\n"
 "<Somebody up there is not {kind|nice},> {hero_or_he} told {his} {nature} {adult=family}. "
 "<{You get what you give|It gives back what you bring|Say something kind},> {adult_said}. {later}, {hero} "
 "{was back|came back} with {some_food}. <{r=I am sorry|I like you|Be my friend|Thank you}!> {hero_cried}. "
 "<{r}!> {cried} the voice. {Hero_or_he} {felt} {joy}. {He} left {some_things} and {a_thing} {outdoors}. "
 "{end_night}"},

{"hiccups", "",
 "{day}, {hero} ate {some_food}. Hic! {He} could not stop. Hic! <{Cure},> {said} {creature}{tail}. Hic! "
 "<{Cure},> {said} {person}{tail}. Hic! <{Cure},> {said} {his} {nature} {adult=family}{tail}. {Hero_or_he} "
 "did it all. Hic! {Hero_or_he} {felt} {sad}.\n"
 "{then} {hero_or_he} met {friend_met} {where}. <{I ate your {taste} {food}|I broke your {look} {thing}|You "
 "are my best friend|There is {creature} in your {clothing}},> {friend_said}. {hero} {jumped|stood "
 "still|sat down}. No hic! <{It is gone|{Cheer}}!> {hero_cried}. <{I am {glad}|That will be {some_food}|It "
 "was nothing},> {friend_said}. <Hic!>"},
{"cure", "",
 "2 Stand {where} and say {weekday} {number} times"
 "|3 Eat {number} {taste} {food} {indoors}"
 "|2 Think of {creature}"
 "|2 Sing to {creature}"
 "|2 Hold {a_thing} on your nose"
 "|Put {some_things} in your {clothing}"},

{"windy_hat", "",
 "One windy {{part}|{weekday}}, the wind {took|got|wanted} {hero}'s {look} {hue=color} "
 "{worn=hat|cap|scarf}. <{Stop|Wait|Come back}!> {hero_cried}. {Hero_or_he} ran past the {x=place}, past "
 "the {y=place}, past {creature} and past {person}. But the {worn} flew into {a} {perch=tree} {where}. "
 "{Hero_or_he} {walked} {path} to {his} {nature} {adult=family}.\n"
 "They came with {a_thing}. But {a} {nature} {color} {bird=robin|owl|crow} sat in the {worn} with "
 "{some_things}! <{It thinks that is its bed|It has a house now},> {hero_said}. <{Do you want it back|What "
 "now}?> {adult_asked}. <{No, I have {a} {color} one|No, it needs it more|Let it sleep},> {hero_said}. "
 "{later}, {number} {nature} {color} birds looked out. {hero} got {a} {look} {color} {clothing} and {felt} "
 "{joy}. {end_night}"},

{"fireflies", "",
 "One {warm|hot|clear} {night|{weekday} night}, {hero} put {number} fireflies in {a} {look} {hue=color} "
 "{jar=jar|pot|lamp} with {some_food} and {a_thing}. <Now I have my own {stars|moon},> {hero_or_he} told "
 "{friend_met}{tail}. {Hero_or_he} {put} the {jar} {indoors}. But {soon|then} only {two|three|four} were "
 "bright.\n"
 "<{Are they {sad}|Do they want {food}}?> {hero_asked}. <{They shine for their friends|They have no friends "
 "in a {jar}|They are {sad}},> {said} {his} {nature} {adult=family}{tail}. {Hero_or_he} {walked} {path} and "
 "{opened the {jar}|let them go}. They flew over the {place_like} {place}, past {creature} and past "
 "{creature}. {hero} {felt} {joy}. {meal} Now {some_things} live in the {jar}. {end_friends}"},

{"little_boat", "",
 "{day}, {hero} made {a} {look} boat of {wood|paper|{a} {color} shoe}. {Hero_or_he} {put} {some_things} in "
 "it, and a letter: <I am {hero}. I like {food} and {hobby}. Who are you?> The boat {walked} {down|up} the "
 "river, past {creature} and past the {place}. {hero} waited {number} weeks and {felt} {sad}. "
 "<{Nobody found it|{A} {animal_kind} ate it|{Grumble}},> {hero_sighed}. <{Advice},> {said} {his} {nature} "
 "{adult=family}{tail}.\n"
 "{later}, {a} {look} {color} letter came with {some_things}. <{Your boat is|I found your boat|Your boat "
 "came to me} {where},> it said. <I like {food}, {things} and {hobby}. {Friend_met}.> {hero} {felt} {joy} "
 "and put {a_thing} and {some_food} in {a} {look} {color} boat. {end_friends}"},

{"swaps", "",
 "{hero} wanted {a} {look} {v=color} {wish=kite|sled|drum|horn}, but {hero_or_he} had only {a} {look} "
 "{w=color} {old=ball|doll|cup|bell|fan}. {day}, {he} {walked} {path}. {Person} had {a} {nature} baby. It "
 "{took|saw|got} the {old} and {laughed|slept|smiled}, and {hero} got {a} {look} {color} "
 "{find=key|clock|lamp|pot}. <I {need|want|love} that {find}!> said the {nature} {elder=villager}{tail}, "
 "and {gave} {him} {number} {taste} {treat=food}.\n"
 "{Where} sat {friend_met} with the {v} {wish} and {felt} {sad}. <I would give {anything|my {wish}} for "
 "{some|your} {treat},> {friend_said}. <{Anything|Really|Even that}?> {hero_asked}. That night they "
 "{all|both} felt {glad}. {end_friends}"},

{"too_many", "",
 "{day}, {hero}'s {adult=family} wanted {fruit=plums|figs|pears|grapes|cherries} for {a} {look} "
 "{dish=pie|cake}. {hero} {walked} {path} with {a} {look} {hue=color} {pail=basket|bag|bowl}. {scenery} "
 "{Hero_or_he} took {number} and ate {number}. How {taste} they were! {He} took {number} and ate {number}, "
 "until {none|only {number}} were left. {then} {hero_or_he} {felt} {sad}. <{Where are the {fruit}|Is the "
 "{pail} full}?> {adult_asked}. <{I ate them|They are in me|In here},> {hero_sighed}, and lay down "
 "{indoors}.\n"
 "{later}, they went again. {hero} {sang|thought of {a_thing}|counted {things}} and ate {none|one}. "
 "{Creature}, {creature} and {person} had {dish}. <{One more|Do you want more}?> {adult_asked}. "
 "<{No, thank you|On {weekday}},> {hero_said}. {end_night}"},

{"night_walk", "",
 "{night}, {hero} and {his} {nature} {adult=family} {walked} home {path} with {a} {look} {hue=color} lamp "
 "and {some_food}. {then} the wind {took|ate|stole} the light. <{I see nothing|It is so dark|{Grumble}}!> "
 "{hero_cried}. <{Wait|Stand still|The dark is only shy}. What do you smell?> {adult_said}. <I smell "
 "{x=smell} and {y=smell},> {hero_said}. <{Then|So} the {place} {is near|is not far}. {Now look|Look} up.>\n"
 "{Number} {bright |{color} |}stars made {a} {x=thing}, {a} {y=thing} and {creature}. {scenery} {hero} "
 "{felt} {joy}. {later}, {Adult} took the lamp again. <{Leave it here|Not yet}. I want to see the {x},> "
 "{hero_said}. {end_night}"},

/* ---- plots for children ---- */
{"child_plot", "",
 "{stuck_kite}|{first_day}|{late_book}|{glasses}|{over_the_fence}|{sandcastle}|{stray}|{tooth}"
 "|{afraid_of_water}"},

{"stuck_kite", "",
 "{day}, {hero}'s {look} {hue=color} kite flew into {a} {perch=tree} {where}. {Hero_or_he} threw {a} "
 "{color} {up=shoe|boot|cap} at it. The {up} did not come down. {Person} threw {a} {look} {b=thing}. "
 "{Creature} threw {number} {c=food}. {Nothing came down|All of it stayed up}.\n"
 "{then} {friend_met} came {path}, eating {bites}. <{What is up there|Does the {perch} grow {c}|Is that my "
 "{thing}}?> {friend_asked}, and went up like {creature}. Down came the {up}, the {b}, the {c} and the "
 "{hue} kite. <{Cheer}!> {hero_cried}. {meal} {end_friends}"},

{"first_day", "",
 "{day}, {hero} went to school for the first time, with {some_things}, {some_food} and {a} {look} "
 "{hue=color} {bag=pen|book|bag}. <{What if nobody likes me|What if they are {grumpy|proud|loud}|What if I "
 "feel {sad}}?> {hero_or_he} asked {his} {nature} {adult=family}. <{Just say "
 "hello|{Advice}},> {adult_said}.\n"
 "They had to {draw|paint} {a} {v=color} {x=thing} and {a} {w=color} {y=animal_kind}. {then} {hero} saw "
 "{friend_met}, who had no {bag} and {felt} {sad}. <Hello,> {hero_sighed}. <Hello,> {friend_said}. They "
 "drew {a} {nature} {y} {on|with|in} {a} {look} {x}, and {some_things}. They shared {some_food}. "
 "<{How was it|Were you {sad}}?> {adult_asked}. <{I said hello|I want to go again}!> {hero_cried}. "
 "{end_friends}"},

{"late_book", "",
 "{hero} had {a} {look} {color} book about {topic=dragons|pirates|trains|the moon}, and it was "
 "{lost|gone|not there}! {Hero_or_he} {searched} {indoors}, {indoors} and {indoors}, and {spotted} "
 "{some_things}, {some_food} and {a_thing}. {Hero_or_he} {felt} {sad}. <{Say you are sorry|{Advice}},> "
 "{said} {his} {nature} {adult=family}{tail}. {hero} {walked} {path}.\n"
 "<I lost the book about {topic},> {hero_or_he} told the {nature} {elder=villager}. <{But it is here|I have "
 "it here},> {elder_said}. <You brought it on {weekday}, with {a} {color} {leaf|feather|sock} in it.> They "
 "laughed, and {person} {danced|sang|laughed} too. {hero} {took} {number} books about {hobby}, {food} and "
 "{things}. {Hero_or_he} {felt} {joy}. {end_night}"},

{"glasses", "",
 "{day}, {hero} said hello to {person}, but it was {a} {color} {bush|gate|wall}! So {his} {nature} "
 "{adult=family} got {him} {look} {hue=color} glasses. <{I look like {creature}|They will "
 "laugh|{Grumble}},> {hero_sighed}, and hid them {indoors}. {then} {friend_met} came. <Look, {creature}!> "
 "{friend_said}. <Where?> {hero_asked}. <And there, {a_thing}!> <Where?> {hero_asked}, and fell over "
 "{creature}.\n"
 "{hero} {walked} home {path} and put on the glasses. Oh! {A_thing}, {creature} and {number} {color} leaves "
 "on {a} {tree}! <{You look {glad}|You look like {person}|I want some too},> {friend_said}. That night, "
 "{hero_or_he} {saw|counted} {number} stars and {a} {color} moon, and {felt} {joy}."},

{"over_the_fence", "",
 "{day}, {hero}'s {look} {hue=color} ball flew past {friend_met} and into {a} {color} house {where}. Crash! "
 "<The {elder=villager} is {grumpy|cross} and eats {food} with {things},> {friend_said}. {hero} {felt} "
 "{sad}, but {hero_or_he} {walked} to the door. <{It was me|I am sorry|I threw the ball},> {hero_sighed}.\n"
 "The {elder} had {a} {look} {color} {pot=pot|lamp|bowl|cup} with {number} holes in it. "
 "<{I never liked it|Well thrown|I once broke {a_thing}}. Do you like {food}?> {elder_said}. {parade} They "
 "put {some_things} and {a} {color} rose in the {pot}. Ever since, {hero}, {friend} and the {elder} played "
 "{where} {every {weekday}|with {creature}|with {some_things}}."},

{"sandcastle", "",
 "{day}, {hero} made a house of sand by the sea, with {number} {color} doors, {some_things} and {a} {look} "
 "{hue=color} flag. Then the sea {came and took it all|took it all|ate it all}. <{Stop|No|Give it back}!> "
 "{hero_cried}. Beside {him} sat {friend_met} with {a_thing}. <{Mine is gone too|It took mine on "
 "{weekday}},> {friend_said}. <Now {number} {nature} fish live there.>\n"
 "<Then they need a {need=school|church|shop|bridge|garden},> {hero_said}. They made a {need} of sand, with "
 "{some_things}, {some_food} and {a_thing} in it. Then the sea {came|came again|took it}. "
 "<{Good {part}, fish|It is for you|Be {glad}}!> {hero_cried}. {meal} That night, {number} {color} fish "
 "{sang|danced|sat} in the {need}."},

{"stray", "",
 "{rain_day}, {a} {nature} {color} {pet=dog|cat} {walked} home with {hero} {path}. <Can it stay?> "
 "{hero_asked}. <{We must ask first|If nobody lost it|Maybe},> {said} {his} {nature} {adult=family}{tail}. "
 "{hero} {gave} it {some_food} and {a} {look} {color} {bed=rug|scarf|coat}. {Hero_or_he} asked {person}, "
 "{person} and {creature}. The {pet} slept {indoors}, {liked} {food} and ran from {things}.\n"
 "{later}, the {nature} {elder=villager} came. {hero} {felt} {sad}. <It is not mine, but I have {a} {look} "
 "{color} {gift=bowl|bag|basket|bell} for it,> {elder_said}. {hero} {danced|sang|smiled} and {felt} {joy}. "
 "<What is its name?> {asked} the {elder}{tail}. <{{Weekday}|Button|Plum|Pepper},> {hero_said}. {meal}"},

{"tooth", "",
 "{hero} had a loose tooth. <Eat {some_food},> {said} {person}{tail}. It did not come out. <Tie it to "
 "{a_thing},> {said} {person}{tail}. It did not come out. <{Advice},> {said} {his} {nature} "
 "{adult=family}{tail}. {hero} {felt} {sad}.\n"
 "{later}, {friend_met} told {him} about {creature} with {a_thing}. {hero} {laughed|jumped|sneezed}, and "
 "out it {flew|came}! They {searched} {indoors} and {indoors}, and {spotted} {some_things}, {some_food} and "
 "the tooth. <{I did not feel it|There it is|{Cheer}}!> {hero_cried}. That night {hero_or_he} slept on it, "
 "and in the morning there {lay|was} {a_thing} and {number} {color} coins. {Hero_or_he} {felt} {joy}. "
 "{end_friends}"},

{"afraid_of_water", "",
 "{day}, {friend_met} swam in the {water=lake|pond|river} like {creature}. <{Come in|It is warm}!> "
 "{friend_cried}. <{I just ate {number} {food}|It is full of {things}|Not today},> {hero_said}. {He} {felt} "
 "{sad} and sat {outdoors}. <{Are you afraid|What is wrong}?> {asked} {his} {nature} {adult=family}{tail}. "
 "<{Only of the wet part|A little},> {hero_sighed}. <{So was I|Start with one foot|{Advice}},> "
 "{adult_said}.\n"
 "On {weekday} {he} put in one foot, and saw {some_things}. On {weekday} {he} put in {his} nose, and saw "
 "{a_thing}. Then {he} lay in the {water} and looked at {creature} {where}. <When do I learn to swim?> "
 "{hero_asked}. <You swam {past the {place}|past {creature}},> {friend_said}. {hero} {felt} {joy}. "
 "{end_friends}"},

/* ---- plots for animals ---- */
{"animal_plot", "", "{winter_store}|{stream}|{flood}|{moon}|{small_house}|{long_sleep}"},

{"winter_store", "",
 "{day}, {hero} hid {number} {taste} {store=food} {where}, {some_food} {where} and {some_things} {where}. "
 "<{Do you know where it all is|Do you need a map}?> asked {friend_met}{tail}. <{I forget nothing|My head "
 "is a map},> {hero_said}. Then it snowed. {Hero_or_he} {searched} {outdoors} and {spotted} {a_thing}. "
 "{Hero_or_he} {searched} {outdoors} and {spotted} {creature}. {Hero_or_he} {felt} {sad}.\n"
 "{friend} came with {some_food}. <{Eat first|There is enough for two},> {friend_said}. {parade} In spring, "
 "there were {number} green leaves {where}. <{My {store}|{Cheer}}!> {hero_cried}. {end_friends}"},

{"stream", "",
 "{day}, there was a {feast=party|feast|picnic} {where}, with {some_food}, {some_food} and {some_things}. "
 "{But the way went|And they all had to go} over a river. {Creature} jumped over. {Creature} jumped too. "
 "<{Come on|It is not far}!> {said} {friend_met}{tail}. <{I must sit by my {thing}|Go without "
 "me|{Grumble}},> {hero_sighed}, and {felt} {sad}.\n"
 "{then} {friend} came back with {a} {look} {color} stone and put it in the water. <{I like you better than "
 "{food}|It is no {feast} without you},> {friend_said}. They put in {number} {color} stones and {a_thing}. "
 "{hero} jumped, past {a} {color} fish and past {creature}. <{I did it|{Cheer}}!> {hero_cried}. {meal} "
 "{hero} {felt} {joy}."},

{"flood", "",
 "{rain_day}, the river {took|ate|broke} the bridge {where}. {hero}, {friend_met}, {creature} and "
 "{creature} had no {food} left. <{We must swim|{Grumble}},> {friend_sighed}. <{We all know how to do "
 "something|Nobody can do it alone},> {hero_said}. So {creature} brought {x=lumber}, {creature} brought "
 "{y=lumber}, {friend} brought {z=lumber}, and {hero} made soup of {some_food} and {some_food}.\n"
 "{Number} times the water took it all, and {number} times they {sat down|sighed|sang|danced} and began "
 "again. {later}, there was {a} {look} {v=color} bridge with {a} {w=color} {lamp|flag|bell} and "
 "{some_things} on it. They all went over it {singing|dancing|laughing}. {meal} {end_friends}"},

{"moon", "",
 "{night}, {hero} saw the moon in the {water=pond|well|river|lake} {where}. <{It fell in|It is cold|The "
 "poor moon}!> {hero_cried}, and ran to {friend_met}. They came with {a} {look} {color} "
 "{net=net|bag|basket}, {some_food} and {a_thing}. But the moon broke into {number} pieces! "
 "<{Now it is lost|{Grumble}},> {friend_sighed}. {They tried it with|They threw in} {number} {color} "
 "{bait=things}, {a_thing} and {a} {look} {thing}.\n"
 "{then} {his} {nature} {adult=family} came with {some_food}. <What do you want with {bait}?> "
 "{adult_asked}. <We want the moon,> {hero_said}. <{Look up|Look over the {place}},> {adult_said}. There it "
 "was, {nature}, {big|round} and {color}. <{It came out|{Cheer}}!> {friend_cried}. They felt {glad}. {meal}"},

{"small_house", "",
 "{snow_day}, {hero} {spotted} {a} {look} {hue=color} {house=sock|boot|cap|hat} {where}. It smelled of "
 "{x=smell} and {y=smell}. {Hero_or_he} sat down in it with {a_thing}. Knock, knock. It was {friend_met} "
 "with {some_things}. <{I am cold|Let me in},> {friend_said}. <{Come in|There is room for you},> "
 "{hero_said}. Knock, knock. It was {creature} with {some_food}. Knock, knock. It was {creature} with "
 "{a_thing}.\n"
 "They talked about {hobby}, {food} and {creature}, and {nobody was cold|it was warm|they all felt {glad}}. "
 "Then {{hero}|{friend}} sneezed, and the {house} {broke|fell to pieces}! <{It was a good house|We were too "
 "many},> {hero_said}. <{Come to my house {where}|I have {a_thing} at home},> {friend_said}. They made "
 "{number} {color} {scarves|socks|caps} of it. {meal}"},

{"long_sleep", "",
 "{day}, {hero} had to {sleep|stay in bed} until spring. {His} {nature} {adult=family} brought {a} {look} "
 "{color} rug and {some_food}. <{I want to see the snow|I am not tired|{Grumble}},> {hero_sighed}. <Tell me "
 "what you love, and I will put it in {a} {look} {hue=color} {box=box|jar|bag},> {adult_said}. <The smell "
 "of {x=smell} and {y=smell},> {hero_said}. <And {creature} {where}. And {some_things}, {hobby}, {a_thing} "
 "and> {hero} slept.\n"
 "One {weather} {{part}|{weekday}}, {hero} woke up. {Friend_met} {sat} {where}. In the {box} were "
 "{some_things}, {some_food} and a cup of {cold|clear} water. <This is the snow you missed,> said "
 "{Adult}{tail}. {hero} {felt} {joy}. {end_friends}"},
};
/* clang-format on */

#undef HER
#undef HIM
#undef GIRL
#undef BOY
#undef SHE
#undef HE

#endif
