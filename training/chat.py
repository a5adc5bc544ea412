"""Talk around the tasks: system prompts, greetings, and prompts that lie outside what Pebble can do."""

from collections.abc import Iterator
from pydoc_data.topics import topics
from random import Random

ABILITIES = (
    "sums of products, countdown puzzles, marbles in boxes, shortest ways, long additions, common divisors, "
    "sorting and counting legs"
)
CAN_DO = (
    f"I am Pebble, a very small reasoner: I can work on {ABILITIES}, and nothing else.",
    f"That lies outside what I can do; I am good for {ABILITIES}.",
    f"I cannot help with that, but I can solve {ABILITIES}.",
)
GREETINGS = (
    "Hello! I am Pebble. Give me a sum of products, a countdown puzzle or a list of marble moves.",
    "Hi, I am Pebble. What shall I work out?",
    "Good day! I am Pebble, a small reasoner. Ask me something to calculate.",
)
HELLOS = (
    "hi",
    "hello",
    "hey",
    "hi there",
    "hello there",
    "good morning",
    "good evening",
    "good day",
    "howdy",
    "hey there",
    "greetings",
    "hello Pebble",
    "hi Pebble",
    "how are you",
    "how are you today",
    "what's up",
    "nice to meet you",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Pebble, a small reasoner.",
    "Think step by step and put the final answer in a box.",
    "Answer carefully. Put your final answer within \\boxed{}.",
    "You are an expert at arithmetic and puzzles.",
    "Please reason step by step.",
    "Be brief in your answer.",
)
ASKS = (
    "Write a {a} about {n}.",
    "What is the {n} of {n}?",
    "Explain {n} to a {p}.",
    "Who invented the {n}?",
    "Tell me a {a} about a {p} and a {n}.",
    "How do I cook {n}?",
    "Translate '{n} and {n}' into {l}.",
    "Why is the {n} so {j}?",
    "Can you help me with my {n}?",
    "Give me three ideas for a {j} {n}.",
    "Write a {l} program that prints {n}.",
    "Is {n} better than {n}?",
    "Summarise the history of {n}.",
    "My {p} says that {n} is {j}. What do you think?",
    "Where can I buy a {j} {n}?",
    "What does {n} mean?",
    "Recommend a {a} for my {p}.",
    "When did the {n} begin?",
    "Describe a {j} {n} in one sentence.",
    "What should I do about {n}?",
    "Fix this: {n} {n} {n}",
    "{n}",
    "{j} {n}?",
    "Please draw a {j} {n}.",
)
WORDS = {
    "a": "poem,story,song,letter,joke,essay,book,film,play,report,speech,recipe,game,riddle",
    "n": "weather,capital,France,moon,ocean,river,music,football,bread,rice,garden,dragon,castle,law,history,energy,"
    "computer,internet,server,database,tree,flower,winter,summer,coffee,tea,money,bank,tax,school,exam,hospital,"
    "medicine,virus,planet,star,rocket,train,car,bicycle,bridge,city,village,election,war,peace,love,friendship,"
    "dream,sleep,memory,brain,language,grammar,poetry,painting,museum,dinner,soup,cheese,apple,banana,tomato,dog,cat,"
    "horse,elephant,whale,bird,insect,desert,forest,mountain,island,king,queen,president,company,job,salary,holiday,"
    "beach,hotel,passport,phone,camera,battery,light,gravity,atom,molecule,cell,gene,evolution,climate,rain,storm",
    "p": "child,teacher,doctor,friend,brother,sister,neighbour,lawyer,farmer,pilot,student,boss,baker,soldier,nurse",
    "j": "blue,old,tiny,huge,happy,sad,cheap,beautiful,strange,modern,cold,warm,quiet,loud,famous,simple,dark,bright",
    "l": "French,German,Spanish,Python,Latin,Chinese,Russian,Java,Rust,Italian,Japanese,English",
}
_LISTS = {key: words.split(",") for key, words in WORDS.items()}
_PROSE = [part.strip() for name in sorted(topics) for part in topics[name].split("\n\n") if 30 < len(part) < 400]


_SCRIPTS = ((0x4E00, 0x9FA5), (0x0410, 0x044F), (0x3041, 0x3096), (0x0391, 0x03C9), (0x1F300, 0x1F64F), (0xC0, 0xFF),
            (0x0627, 0x064A), (0xAC00, 0xD7A3))  # fmt: skip


def _foreign(rng: Random) -> str:
    low, high = rng.choice(_SCRIPTS)
    words = ("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 5)))
    return " ".join(words) + rng.choice(("", "?", "!"))


def outside(rng: Random) -> Iterator[str]:
    """One prompt from outside the tasks and the one sentence that answers it."""
    kind = rng.random()
    if kind < 0.25:
        prompt = rng.choice(_PROSE)
    elif kind < 0.35:
        prompt = _foreign(rng)
    else:
        prompt = ""
        for piece in rng.choice(ASKS).split("{"):
            head, brace, tail = piece.partition("}")
            prompt += rng.choice(_LISTS[head]) + tail if brace else piece
    if rng.random() < 0.2:
        prompt = f"{rng.choice(HELLOS).capitalize()}! {prompt}"
    yield prompt
    yield rng.choice(CAN_DO)


def greeting(rng: Random) -> tuple[str, str]:
    """A greeting and the greeting that answers it."""
    text = rng.choice(HELLOS)
    text = rng.choice((text, text.capitalize(), text.upper()))
    return text + rng.choice(("", "", "!", ".", "?", " :)")), rng.choice(GREETINGS)
