"""The benchmark of all kernels: each script gets a file that the page on performance reads, and failures are told."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import kernels
import performance

OTHERS = {"energy_h200.json", "rows_h200.json", "layer_h200.json"}
READ = {*performance.MATMUL_FILES, *performance.ATTENTION_FILES, *OTHERS}


def test_result_files_are_those_of_the_page_and_scripts_exist():
    runs = [run for found in kernels.RUNS.values() for run in found]
    assert {result for result, _, _ in runs} <= READ
    assert all((Path(kernels.__file__).parent / script).is_file() for _, script, _ in runs)


def test_a_failure_is_told_and_the_others_run(tmp_path, monkeypatch, capfd):
    """With stand-ins for the scripts, of which one ends with an error."""
    for _, script, _ in (run for found in kernels.RUNS.values() for run in found):
        body = "sys.exit(3)" if script == "rows.py" else "open(sys.argv[1], 'w').write('{}')"
        (tmp_path / script).write_text(f"import sys\n{body}\n")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    out = tmp_path / "out"
    assert kernels.main([str(out)]) == 1
    assert "failed: rows_h200.json" in capfd.readouterr().out
    assert len(list(out.iterdir())) == sum(map(len, kernels.RUNS.values())) - 1
    assert kernels.main([str(out), "--only", "layer"]) == 0
