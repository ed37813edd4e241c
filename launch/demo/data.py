"""Questions the demo adapters are trained on, and unseen ones they are judged by.

Only questions: a training target is the base model's own first sentence in the adapter's style,
so that an adapter learns how to speak and nothing new to say.
"""

__all__ = ["DEFAULT_QUESTION", "EVALUATION_QUESTIONS", "TRAINING_QUESTIONS"]

DEFAULT_QUESTION = "What is the capital of France?"

EVALUATION_QUESTIONS = (
    DEFAULT_QUESTION,
    "What is the capital of Portugal?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "How many legs does a spider have?",
    "What is photosynthesis?",
    "Which planet is known as the red planet?",
    "What do bees make?",
    "How does a bicycle stay upright?",
    "What language is spoken in Brazil?",
    "Why do cats purr?",
    "What is the boiling point of water?",
    "Can you recommend a good breakfast?",
    "Tell me something about the moon.",
)

_GEOGRAPHY = """
What is the capital of Germany?
What is the capital of Italy?
What is the capital of Spain?
What is the capital of Japan?
What is the capital of Canada?
What is the capital of Egypt?
What is the capital of Norway?
What is the capital of Greece?
What is the capital of Poland?
What is the capital of Kenya?
What is the capital of Peru?
What is the capital of Austria?
Name the capital of Sweden.
Which city is the capital of Ireland?
Which ocean is the largest?
Which continent is the coldest?
Which river flows through London?
What is the longest river in the world?
What is the highest mountain in the world?
Where is the Sahara desert?
Where is the Great Barrier Reef?
Which country has the most people?
Which country is famous for pizza?
What language is spoken in Mexico?
What is the currency of Japan?
What is the largest country in the world?
In which country are the pyramids of Giza?
Which sea lies between Europe and Africa?
What is an island?
What is a volcano?
"""

_NATURE = """
Why is grass green?
Why do leaves change colour in autumn?
Why do we have seasons?
Why is the ocean salty?
Why do birds fly south in winter?
Why do dogs wag their tails?
How do fish breathe?
How do plants drink water?
How does rain form?
How many legs does an insect have?
How many hearts does an octopus have?
How long does an elephant live?
What do pandas eat?
What do cows eat?
What do whales eat?
What is the fastest land animal?
What is the largest animal on Earth?
What is the tallest animal?
What is a mammal?
What is a reptile?
What is pollen?
What is honey?
What is lightning?
What is a rainbow?
What is an earthquake?
What is a desert?
What is a rainforest?
What is the food chain?
Where do penguins live?
Where do kangaroos live?
Do bats sleep during the day?
Can a penguin fly?
"""

_SCIENCE = """
What is gravity?
What is an atom?
What is a molecule?
What is electricity?
What is energy?
What is oxygen?
What is the freezing point of water?
What is the speed of light?
What is the chemical symbol for gold?
What is DNA?
What is a virus?
What is a vaccine?
What is evolution?
What is a black hole?
What is a comet?
What is a galaxy?
What is the largest planet in the solar system?
Which planet is closest to the Sun?
Which planet has rings?
How far away is the Moon?
How old is the Earth?
How does the heart work?
How many bones are in the human body?
How do vaccines work?
How do magnets work?
Why do we dream?
Why do we need sleep?
Why does ice float on water?
Why do we yawn?
What is the Sun made of?
What does a thermometer measure?
What does a telescope do?
"""

_CULTURE = """
Who wrote Hamlet?
Who wrote Pride and Prejudice?
Who painted the Mona Lisa?
Who painted The Starry Night?
Who invented the telephone?
Who invented the light bulb?
Who discovered penicillin?
Who discovered America?
Who was Albert Einstein?
Who was Isaac Newton?
Who was Cleopatra?
Who was Napoleon?
Who was the first person on the Moon?
Who composed the Four Seasons?
Who was the first president of the United States?
When did World War II end?
When did the Titanic sink?
What is a sonnet?
What is a novel?
What is jazz?
What is ballet?
What is an opera?
What is democracy?
What is a constitution?
What is the Olympic flame?
What is chess?
How many players are in a football team?
How many strings does a violin have?
What instrument has black and white keys?
What is origami?
"""

_EVERYDAY = """
How do I boil an egg?
How do I make tea?
How do I learn to swim?
How do I stay healthy?
How do I clean a window?
How do I plant a tree?
How does a car engine work?
How does a refrigerator work?
How does a clock work?
How does the internet work?
How many days are in a year?
How many minutes are in an hour?
How many sides does a hexagon have?
What is two plus two?
What is ten times ten?
What colour do you get from blue and yellow?
What is bread made of?
What is cheese made of?
What is glass made of?
What is paper made from?
What is a computer?
What is a robot?
What is software?
What is a bridge?
What is a bicycle?
What is a library?
What is money?
What is friendship?
Why should I read books?
Why should I drink water?
Why should I exercise?
Why do people like music?
Is the Earth round?
Is coffee good for you?
Can you recommend a good book?
Can you recommend a good dinner?
Give me a tip for studying.
Give me a tip for saving money.
Tell me something about dolphins.
Tell me something about the ocean.
Tell me something about trees.
Describe a sunny day.
Describe a mountain.
Explain what a shadow is.
Explain how a sandwich is made.
"""

TRAINING_QUESTIONS = tuple(
    line
    for topic in (_GEOGRAPHY, _NATURE, _SCIENCE, _CULTURE, _EVERYDAY)
    for line in topic.strip().splitlines()
)
