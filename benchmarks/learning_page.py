"""docs/results.md and its pictures, from the numbers that `learning_curve.py` measured and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_table import table

from isojax.rl.charts import Line, picture, smoothed

ARMS = ("exact", "native")
ENDS = ("first", "last")
METRICS = {arm: f"learning_curve_{arm}_h200.jsonl" for arm in ARMS}
"""Both runs' metrics, beside the file of the numbers."""
SMOOTHED = 10
REWARD, MISMATCHES, KL, CLIP = (
    "learning_reward.svg",
    "learning_mismatches.svg",
    "learning_kl.svg",
    "learning_clip.svg",
)


def pictures(found: Mapping[str, Any]) -> dict[str, str]:
    """The SVG files by name. found: what `learning_curve.measured` returns."""
    steps = range(1, found["steps"] + 1)
    curves = {arm: found["arms"][arm]["curves"] for arm in ARMS}
    reward = [
        line
        for color, arm in enumerate(ARMS, start=1)
        for line in (
            Line(f"{arm}, steps", curves[arm]["reward_mean"], color, faint=True),
            Line(f"{arm}, mean of {SMOOTHED}", smoothed(curves[arm]["reward_mean"], SMOOTHED), color),
        )
    ]

    def of_both(name: str) -> list[Line]:
        return [Line(arm, curves[arm][name], color) for color, arm in enumerate(ARMS, start=1)]

    divergence = [
        Line(f"{arm}, {label}", curves[arm][name], color)
        for color, (arm, name, label) in enumerate(
            [(arm, *pair) for arm in ARMS for pair in (("policy_kl", "k3"), ("policy_kl_k1", "k1"))], start=1
        )
    ]
    return {
        REWARD: picture("Mean reward", steps, reward),
        MISMATCHES: picture("Tokens whose bits differ", steps, of_both("mismatch_tokens"), unit="a step"),
        KL: picture("KL, rollout against trainer", steps, divergence, unit="nats a token"),
        CLIP: picture("Clip fraction", steps, of_both("clip_fraction")),
    }


def page(found: Mapping[str, Any], where: str = "pictures") -> str:
    """The page's text. where: the pictures' folder, as seen from the page's."""
    config = found["config"]
    rollout, task = config["rollout"], config["task"]
    prompts = task["name"] or task["path"] or task["prompts"]
    policy = config["policy"].get("source") or "random weights"
    completions = rollout["prompts_per_step"] * rollout["group_size"]
    commands = [f"isojax train {found['examples'][arm]}" for arm in ARMS if found["examples"][arm]]
    toolchain = ", ".join(f"{name} {version}" for name, version in found["toolchain"].items() if version)
    parts = [
        "# Results: learning with equal bits, and without",
        "Made by `benchmarks/learning_curve.py` from `benchmarks/results/learning_curve_h200.json`. Do not edit it.",
        f"{found['steps']} steps of {config['algorithm']['name'].upper()} on {prompts}, "
        f"policy {policy}: {rollout['prompts_per_step']} prompts of {rollout['group_size']} completions a step "
        f"({completions} in all), at most {rollout['max_tokens']} tokens each, learning rate "
        f"{config['optimizer']['learning_rate']:g}, seed {config['seed']}. One run in each arm, equal in every setting "
        f"but `policy.arm` and the checks. Device: {', '.join(found['devices'])}; {toolchain}; {found['date']}.",
        "\n".join(f"    {command}" for command in [*commands, found["command"]]),
        f"![mean reward of both arms]({where}/{REWARD})",
        _reward_table(found),
        f"A standard error is that of the mean of {found['steps_averaged']} steps, from their scatter. It says nothing "
        "of other seeds, of which none was run. Both arms start from the same weights and see the same prompts; each "
        "engine draws tokens in a way of its own, so samples differ from the first step on.",
        "## What was compared",
        _comparison_table(found),
        "A token differs where one bit of its log-probability does between the engine that sampled it and the trainer. "
        "With one update a rollout the KL estimates and the clip fraction are 0 unless engine and trainer disagree. "
        "Stock vLLM hands out no full rows.",
        "Each step's metrics: " + ", ".join(f"`benchmarks/results/{METRICS[arm]}`" for arm in ARMS) + ".",
        f"![tokens whose bits differ]({where}/{MISMATCHES})",
        f"![KL, k1 and k3, of both arms]({where}/{KL})",
        f"![clip fraction of both arms]({where}/{CLIP})",
    ]
    return "\n\n".join(parts) + "\n"


def _reward_table(found: Mapping[str, Any]) -> str:
    part, reward = found["steps_averaged"], found["reward"]
    distances = reward["standard_errors_apart"]
    rows = []
    for arm in ARMS:
        ends = (f"{reward[arm][end]['mean']:.4f} ± {reward[arm][end]['standard_error']:.4f}" for end in ENDS)
        rows.append((arm, *ends, _distance(distances[f"{arm}, last over first"])))
    ends = (_distance(distances[f"{end}, exact over native"]) for end in ENDS)
    rows.append(("exact over native, in standard errors", *ends, ""))
    titles = ("arm", f"mean reward, first {part} steps", f"last {part} steps", "gain in standard errors")
    return table(titles, rows)


def _comparison_table(found: Mapping[str, Any]) -> str:
    exact, native = (found["arms"][arm] for arm in ARMS)
    counts = (
        ("sampled tokens compared", "tokens"),
        ("of these, tokens that differ", "mismatch_tokens"),
        ("ratios off 1 before the update", "first_ratio_off_one"),
        ("full rows compared", "full_rows"),
        ("of these, rows that differ", "full_row_mismatches"),
    )
    numbers = (
        ("largest difference, nats", "mismatch_max_abs", ".3g"),
        ("KL k3, mean of all steps, nats a token", "policy_kl_mean", ".3g"),
        ("KL k1, mean of all steps, nats a token", "policy_kl_k1_mean", ".3g"),
        ("clip fraction, mean of all steps", "clip_fraction_mean", ".3g"),
        ("median step, seconds", "seconds_step_median", ".2f"),
    )
    rows = [(what, f"{exact[name]:,}", f"{native[name]:,}") for what, name in counts]
    rows += [(what, format(exact[name], form), format(native[name], form)) for what, name, form in numbers]
    return table(("over all steps", *ARMS), rows)


def _distance(errors: float | None) -> str:
    return "none" if errors is None else f"{errors:+.1f}"
