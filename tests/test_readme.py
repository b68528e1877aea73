"""The README's reproduction is run as it stands there: it must fail without isojax and pass with it."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_readme_reproduction_differs_in_plain_jax_and_not_in_isojax():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    plain, ours = (int(line.split(":")[1].split()[0]) for line in printed.getvalue().splitlines())
    assert plain > 0
    assert ours == 0


def test_every_link_of_the_readme_exists():
    links = re.findall(r"\]\((docs/[^)]+)\)", README.read_text())
    assert links
    missing = [link for link in links if not (README.parent / link).exists()]
    assert missing == []
