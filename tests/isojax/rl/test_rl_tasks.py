"""Prompts, rewards and their order."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts.errors import BadCheckpoint, BadConfig, EmptyBatch, PromptTooLong
from isojax.rl.config import TaskSection
from isojax.rl.data_order import example_indices
from isojax.rl.prompts import PromptEncoder, encode_prompts
from isojax.rl.tasks import Example, open_task, read_examples


@pytest.fixture
def own_module(tmp_path):
    (tmp_path / "own_rewards.py").write_text(
        "def length(example, tokens, text):\n    return len(tokens) / example.fields['best']\n"
        "def broken(example, tokens, text):\n    return float('nan')\n"
        "def prompts(count):\n    return [{'tokens': [index]} for index in range(count)]\n"
    )
    yield tmp_path
    sys.modules.pop("own_rewards", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path.resolve())]


def jsonl(folder, *lines):
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return TaskSection(source="jsonl", path="prompts.jsonl", reward="own_rewards:length")


def test_a_jsonl_file_with_a_reward_of_ones_own(own_module):
    task = open_task(jsonl(own_module, '{"tokens": [1, 2], "best": 4}', "", '{"prompt": "hi", "best": 2}'), own_module)
    assert [example.tokens for example in task.examples] == [(1, 2), None]
    assert task.examples[1].prompt == "hi"
    assert task.score(task.examples[0], (5, 6), "") == 0.5


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "a JSON object"),
        ("[1]", "An example has keys"),
        ('{"answer": 1}', "the prompt, once"),
        ('{"prompt": "a", "text": "b"}', "the prompt, once"),
        ('{"tokens": [1, "2"]}', "a list of token ids"),
        ('{"tokens": [-1]}', "a list of token ids"),
        ('{"prompt": 3}', "a string"),
        ('{"messages": [{"role": "user"}]}', "role"),
    ],
)
def test_a_bad_line_names_the_file_and_the_line(own_module, line, says):
    section = jsonl(own_module, '{"tokens": [1]}', line)
    with pytest.raises(BadConfig, match=says) as refusal:
        open_task(section, own_module)
    assert "prompts.jsonl, line 2" in str(refusal.value)


def test_a_file_without_examples_and_a_missing_file_are_refused(own_module):
    with pytest.raises(EmptyBatch, match=r"prompts\.jsonl"):
        open_task(jsonl(own_module, ""), own_module)
    with pytest.raises(BadConfig, match="readable JSONL"):
        read_examples(own_module / "absent.jsonl")


@pytest.mark.parametrize(
    ("reward", "says"),
    [("own_rewards", "module:function"), ("absent:f", "no module 'absent'"), ("own_rewards:shortest", "broken")],
)
def test_a_missing_reward_function_is_refused_with_what_there_is(own_module, reward, says):
    section = jsonl(own_module, '{"tokens": [1]}').model_copy(update={"reward": reward})
    with pytest.raises(BadConfig, match=says):
        open_task(section, own_module)


def test_prompts_may_come_from_a_function_with_settings(own_module):
    section = TaskSection(
        source="function", prompts="own_rewards:prompts", reward="own_rewards:broken", settings={"count": 3}
    )
    task = open_task(section, own_module)
    assert len(task.examples) == 3
    with pytest.raises(BadConfig, match="own_rewards:broken"):
        task.score(task.examples[0], (1,), "")


def test_reasoning_gym_asks_and_scores():
    task = open_task(TaskSection(source="reasoning_gym", name="chain_sum", size=5), None)
    example = task.examples[2]
    assert len(task.examples) == 5
    assert task.score(example, (), f" {example.fields['answer']}\n") == 1.0
    assert task.score(example, (), "no idea") < 0.5
    with pytest.raises(BadConfig, match="chain_sum"):
        open_task(TaskSection(source="reasoning_gym", name="chain_summ"), None)
    with pytest.raises(BadConfig, match="min_termz"):
        open_task(TaskSection(source="reasoning_gym", name="chain_sum", settings={"min_termz": 1}), None)


def test_every_epoch_visits_every_example_once_in_its_own_order():
    order = example_indices(seed=4, position=0, count=30, size=10)
    epochs = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    # A resumed run needs the position alone.
    assert example_indices(seed=4, position=13, count=9, size=10) == order[13:22]
    assert example_indices(seed=5, position=0, count=10, size=10) != epochs[0]


@pytest.fixture
def chat_folder(tmp_path):
    words = {word: number for number, word in enumerate(["<unk>", "user", "system", "hi", "you", "are", "kind", "go"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<unk>"}))
    return tmp_path


def test_a_prompt_goes_through_the_chat_template_and_text_does_not(chat_folder):
    encoder = PromptEncoder(chat_folder)
    assert encoder.encode(Example(prompt="hi")) == (1, 3, 7)
    assert encoder.encode(Example(prompt="hi"), system="you are kind") == (2, 4, 5, 6, 1, 3, 7)
    assert encoder.encode(Example(text="hi")) == (3,)
    assert encoder.encode(Example(tokens=(9, 9))) == (9, 9)
    assert encoder.decode((3, 4)) == "hi you"


def test_text_without_a_tokenizer_or_template_is_refused(tmp_path, chat_folder):
    with pytest.raises(BadConfig, match="no tokenizer"):
        PromptEncoder(tmp_path / "none").encode(Example(text="hi"))
    (chat_folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadConfig, match="no chat template"):
        PromptEncoder(chat_folder).encode(Example(prompt="hi"))
    (chat_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        PromptEncoder(chat_folder)


def test_prompts_that_cannot_be_run_are_refused(tmp_path):
    encoder = PromptEncoder(tmp_path)
    limits = {"system": None, "max_tokens": 4, "max_position": 8, "vocab_size": 10}
    assert encode_prompts(encoder, [Example(tokens=(1,) * 4)], **limits) == [(1,) * 4]
    with pytest.raises(PromptTooLong, match="8 tokens in all"):
        encode_prompts(encoder, [Example(tokens=(1,)), Example(tokens=(1,) * 5)], **limits)
    with pytest.raises(EmptyBatch, match="prompt"):
        encode_prompts(encoder, [Example(tokens=())], **limits)
    with pytest.raises(BadConfig, match="token 10"):
        encode_prompts(encoder, [Example(tokens=(10,))], **limits)
