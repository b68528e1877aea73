"""Prompts, rewards and their order."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from contracts.errors import BadCheckpoint, BadConfig, EmptyBatch, PromptTooLong
from isojax.rl.assemble import package_weights
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
        "def careless(example, tokens, text):\n    return example.fields['absent']\n"
        "def huge(example, tokens, text):\n    return 10**400\n"
        "def two(example, tokens):\n    return 1\n"
        "def five():\n    return 5\n"
        "def lazy():\n    yield {'tokens': [1]}\n    yield 1 / 0\n"
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
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        ('{"answer": 1}', "the prompt, once"),
        ('{"prompt": "a", "text": "b"}', "the prompt, once"),
        ('{"tokens": [1, "2"]}', "a list of token ids"),
        ('{"tokens": [-1]}', "a list of token ids"),
        ('{"tokens": [1.0]}', "a list of token ids"),
        ('{"tokens": [1], "tokens": [2]}', "the key twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"messages": []}', "role"),
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
    [
        ("own_rewards", "module:function"),
        (".own_rewards:length", "module:function"),
        ("absent:f", "no module 'absent'"),
        ("absent.part:f", "no module 'absent'"),
        ("own_rewards:shortest", "broken"),
        ("sys:shortest", "sys has no function"),
    ],
)
def test_a_missing_reward_function_is_refused_with_what_there_is(own_module, reward, says):
    section = jsonl(own_module, '{"tokens": [1]}').model_copy(update={"reward": reward})
    with pytest.raises(BadConfig, match=says):
        open_task(section, own_module)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("careless", ("KeyError: 'absent'", "own_rewards:careless", "own_rewards.py, line 8")),
        ("two", ("TypeError", "own_rewards:two", "own_rewards.py, line 11")),
        ("huge", ("own_rewards:huge", "finite")),
    ],
)
def test_a_reward_that_fails_is_named_with_its_line(own_module, reward, says):
    task = open_task(
        jsonl(own_module, '{"tokens": [1]}').model_copy(update={"reward": f"own_rewards:{reward}"}), own_module
    )
    with pytest.raises(BadConfig) as refusal:
        task.score(task.examples[0], (1,), "")
    for part in ("task.reward", *says):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("prompts", "settings", "says"),
    [
        ("five", {}, ("TypeError", "own_rewards:five")),
        ("prompts", {"amount": 1}, ("TypeError", "'amount'", "task.settings")),
        ("lazy", {}, ("ZeroDivisionError", "own_rewards.py, line 17")),
    ],
)
def test_prompts_that_fail_are_named(own_module, prompts, settings, says):
    section = TaskSection(
        source="function", prompts=f"own_rewards:{prompts}", reward="own_rewards:length", settings=settings
    )
    with pytest.raises(BadConfig) as refusal:
        open_task(section, own_module)
    for part in ("task.prompts", *says):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", ("SyntaxError", "own_failing.py, line 1")),
        ("\nraise ValueError('boom')\n", ("ValueError: boom", "own_failing.py, line 2")),
        ("import not_installed_anywhere\n", ("no module 'not_installed_anywhere'",)),
    ],
)
def test_a_module_that_fails_to_import_is_named_with_its_line(own_module, text, says):
    (own_module / "own_failing.py").write_text(text)
    section = jsonl(own_module, '{"tokens": [1]}').model_copy(update={"reward": "own_failing:f"})
    with pytest.raises(BadConfig) as refusal:
        open_task(section, own_module)
    for part in ("task.reward", "own_failing:f", *says):
        assert part in str(refusal.value)


@pytest.mark.parametrize("source", ["", ".x", "absent.x", "absent", "sys", "json"])
def test_a_package_without_weights_is_refused(source):
    with pytest.raises(BadConfig, match=r"policy\.source"):
        package_weights(f"package:{source}")


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


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer_config.json", b"[1]", "a JSON object"),
        ("tokenizer_config.json", b"\xff", "UTF-8"),
        ("tokenizer_config.json", b"[" * 100_000, "nested too deeply"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "tools", "template": "x"}]}', "named default"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
        ("tokenizer.json", b"\xff", "damaged"),
        ("tokenizer.json", None, "cannot be read"),
    ],
)
def test_a_damaged_tokenizer_folder_is_refused_by_file(chat_folder, file, content, says):
    (chat_folder / file).unlink(missing_ok=True)
    if content is None:
        (chat_folder / file).mkdir()
    else:
        (chat_folder / file).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=says) as refusal:
        PromptEncoder(chat_folder)
    assert file in refusal.value.field


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ 1 / 0 }}", "{% if %}", "{{ absent.part }}"])
def test_a_template_that_fails_is_refused(chat_folder, template):
    (chat_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(BadConfig, match="chat template takes"):
        PromptEncoder(chat_folder).encode(Example(prompt="hi"))


def test_a_list_of_templates_has_a_default_and_text_has_a_utf8_form(chat_folder):
    templates = [{"name": "tools", "template": "go"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert PromptEncoder(chat_folder).encode(Example(prompt="hi you")) == (3, 4)
    with pytest.raises(BadConfig, match="lone surrogates"):
        PromptEncoder(chat_folder).encode(Example(text="\ud800"))


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
