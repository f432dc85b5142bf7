"""What the README, the results and the pages of the papers say is what was measured.

That their code runs and their links exist is tested in ``test_docs.py``.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.lab.data import MissingData, load
from equipoise.lab.results.costs import shown
from equipoise.models.opteq.model import SIZES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SAID = " ".join((ROOT / "results" / "README.md").read_text().split())  # without line breaks
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def test_first_example_is_five_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import", "#"))]) <= 5


def test_the_citation_is_that_of_the_citation_file():
    said = dict(re.findall(r"^  (\w+) *= \{+([^{}]+)\}", README, re.M))
    citation = (ROOT / "CITATION.cff").read_text()
    assert said["version"] == eq.__version__
    for line in (f'title: "{said["title"]}"', f'name: "{said["author"]}"', f"license: {said['license']}"):
        assert line in citation


def test_one_version():
    assert f"version: {eq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## \[{re.escape(eq.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_what_is_said_of_the_benchmark_is_what_was_measured():
    """The tables are generated from this file; these are the sentences below them in docs/benchmarks.md."""
    tables = json.loads((ROOT / "results" / "benchmarks" / "bench.json").read_text())["tables"]

    def column(start, name, end=""):
        (rows,) = (rows for title, rows in tables.items() if title.startswith(start) and title.endswith(end))
        return {row["solver"]: row.get(name) for row in rows}

    def ours(values):
        return [value for solver, value in values.items() if not solver.startswith("torchdeq")]

    dense, conv, multiscale = (column(f"{n} ", "time ratio", "differentiate") for n in ("(i)", "(ii)", "(iii)"))
    plain = "torchdeq fixed_point_iter"
    assert max(dense["Picard()"], dense[plain]) < min(v for k, v in dense.items() if k not in ("Picard()", plain))
    assert min(v for v in conv.values() if v) == conv["Anderson(6)"]
    assert column("(ii) ", "to 1e-06", ": solve")["torchdeq anderson"] is None
    assert conv["torchdeq broyden"] > 10
    assert 1.5 < conv[plain] < 2.5
    assert max(*ours(multiscale), multiscale[plain]) < 4 / 3 * min(*ours(multiscale), multiscale[plain])
    assert min(multiscale["torchdeq anderson"], multiscale["torchdeq broyden"]) > 2
    calls, overhead = (column("(ii) ", name, ": solve") for name in ("to 1e-06", "overhead"))
    assert calls["Broyden(12)"] <= calls["torchdeq broyden"]
    assert overhead["Broyden(12)"] < overhead["torchdeq broyden"] / 4
    growth = column("peak memory", "growth")
    assert growth.pop("torchdeq broyden") > 5
    assert max(growth.values()) < 1.1
    assert max(ours(column("one slow sample", "ratio"))) < 1.15


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.result.json")), ids=lambda path: path.name)
def test_the_table_of_results_says_what_the_runs_say(path):
    name = path.relative_to(ROOT / "results").as_posix().removesuffix(".result.json")
    result = json.loads(path.read_text())
    (row,) = re.findall(rf"^\| `equipoise train {name}[ `].*$", (ROOT / "results" / "README.md").read_text(), re.M)
    solves, converged = result["test"]["solver"].get("forward"), "-"  # MAML and its like solve nothing
    if solves is not None:
        median = solves["steps"]["median"]
        converged = f"{1 - solves['failed']:.0%}, median {median} step{'s' if median > 1 else ''}"
    seconds = result["seconds"]
    for said in (
        f"| {result['parameters']:,} |",
        f"| {score(result['test'])} |",
        f"| {converged} |",
        f"| {seconds:.0f} s |" if seconds < 60 else f"| {seconds / 60:.0f} min |",
    ):
        assert said in row


@pytest.mark.parametrize("name", ["mondeq/cifar10-conv", "mdeq/cifar10-small"])
def test_the_accuracies_of_every_epoch_are_those_of_the_log(name):
    log = (ROOT / "results" / f"{name}.log.jsonl").read_text().splitlines()
    epochs = [record for record in map(json.loads, log) if record["kind"] == "epoch"]
    assert f"| accuracy | {' | '.join(format(epoch['test']['accuracy'], '.2%') for epoch in epochs)} |" in SAID
    assert f"| minutes | {' | '.join(format(epoch['seconds'] / 60, '.0f') for epoch in epochs)} |" in SAID


def test_the_residuals_of_mdeq_are_those_of_the_log():
    log = (ROOT / "results" / "mdeq" / "cifar10-small.log.jsonl").read_text().splitlines()
    epochs = [record for record in map(json.loads, log) if record["kind"] == "epoch"]
    solves = [solve for epoch in epochs for part in ("train", "test") for solve in epoch[part]["solver"].values()]
    assert {result for solve in solves for result in solve["results"]} == {"MAX_STEPS"}
    ends = [epoch["test"]["solver"]["forward"]["residual"]["median"] for epoch in epochs]
    assert f"over the test images is {ends[0]:.2f}, {ends[1]:.2f} and {ends[2]:.2f} in the warm-up" in SAID
    assert f"then between {min(ends[3:]):.3f} and {max(ends[3:]):.3f}" in SAID


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.table.json")), ids=lambda path: path.name)
def test_the_tables_say_what_was_measured(path):
    for row in json.loads(path.read_text())["rows"]:
        measured = f"{row['measured']:.2%}" + (f" ± {row['spread']:.2%}" if row["seeds"] > 1 else "")
        assert f"| {row['label']} | {row['parameters']:,} | {measured} |" in SAID


def test_what_training_cost_at_equal_time_is_what_was_measured():
    for row in json.loads((ROOT / "results" / "mondeq" / "mnist-equal.table.json").read_text())["rows"]:
        costs = row["costs"]
        calls = [costs[f"{kind} evaluations"] for kind in ("forward", "backward") if costs[f"{kind} evaluations"]]
        steps = f"{' + '.join(f'{n:.1f}' for n in calls)} |".lstrip()
        start = f"| {row['label']} | {row['parameters']:,} | {row['measured']:.2%} | {row['epochs']} of "
        assert re.search(
            rf"{re.escape(start)}[\d,]+ \| {shown('time', costs)} \| {re.escape(steps)} "
            rf"{costs['peak memory'] / 1e6:,.0f} MB \|",
            SAID,
        )


def test_what_is_said_of_the_plain_deq_is_what_was_measured():
    log = (ROOT / "results" / "mondeq" / "plain-deq.row-3.log.jsonl").read_text().splitlines()
    epochs = [record for record in map(json.loads, log) if record["kind"] == "epoch"]
    assert epochs[-1]["train"]["solver"]["forward"]["failed"] == 0  # "every forward solve of the last epoch converges"
    said, step = [], 0
    for epoch in epochs:
        solver = epoch["train"]["solver"]
        said.append([f"{solver[way]['evaluations'] / (epoch['step'] - step):.1f}" for way in ("forward", "backward")])
        step = epoch["step"]
    forward, backward = (f"{', '.join(counts[:-1])} and {counts[-1]}" for counts in zip(*said, strict=True))
    assert f"a minibatch takes {forward} evaluations forward and {backward} backward" in SAID


@pytest.mark.parametrize("name", ["opteq-cifar10", "opteq-imagenette"])
def test_the_tables_of_mopteq_and_mdeq_are_those_of_the_files(name):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    columns = ("step s", "ratio to MDEQ", "answer s", "answer ratio")
    for row in json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text()):
        numbers = [str(row["parameters"]), *(f"{row[column]:.2f}" for column in ("forward steps", *columns))]
        assert re.search(r" +".join([re.escape(row["model"]), *numbers, f"{row['peak MB']:.0f}"]), page), row


def test_what_coupling_is_worth_after_an_epoch_is_lost_among_the_seeds():
    rows = json.loads((ROOT / "results" / "opteq" / "reduced.table.json").read_text())["rows"]
    alike = [row for row in rows if row["parameters"] == 17_162 and "perturbed" not in row["label"]]
    accuracies = [row["measured"] for row in alike]
    assert len(alike) == 4
    assert max(accuracies) - min(accuracies) < min(row["spread"] for row in alike)
    cost = next(row["measured"] for row in rows if row["label"] == "MOptEq") - rows[-1]["measured"]
    assert f"perturbed branches cost {100 * cost:.1f} points" in SAID
    conv = next(row for row in rows if row["label"] == "POptEq, conv")
    assert conv["measured"] - conv["spread"] > max(row["measured"] + row["spread"] for row in rows if row is not conv)


def test_predicting_the_most_frequent_class_of_camvid_scores_as_stated():
    try:
        data = load("camvid", folders=[ROOT.parent / "shared" / "data"], validation=0)
    except MissingData as missing:
        pytest.skip(str(missing))
    classes = len(data.class_names)
    masks = [split.read(torch.arange(len(split)))[1].flatten().long() for split in (data.train, data.test)]
    train, test = (torch.bincount(mask[mask < classes], minlength=classes).double() for mask in masks)
    share = (test[train.argmax()] / test.sum()).item()
    assert f"{data.class_names[train.argmax()]}, gives a mean IoU of {share / classes:.2%} and" in SAID
    assert f"and a pixel accuracy of {share:.2%}" in SAID


def score(test):
    if "accuracy" in test:
        return f"{test['accuracy']:.2%}"
    if "psnr" in test:
        return f"{test['psnr']:.2f} dB"
    return f"{test['mean IoU']:.2%} mean IoU, {test['pixel accuracy']:.2%} pixel accuracy"


def test_the_sizes_of_mdeq_are_as_stated():
    stated = re.findall(r"^\| `(\S+)`[^|]*\|[^|]*\| ([\d,]+)", (ROOT / "docs" / "mdeq.md").read_text(), re.M)
    assert len(stated) == 10
    for name, count in stated:
        head = "segmentation" if name.startswith("cityscapes") else "classification"
        classes = {"cifar10": 10, "imagenet": 1000, "cityscapes": 19}[name.partition("-")[0]]
        with torch.device("meta"):
            model = eq.models.MDEQ((3, 32, 32), classes, size=name, head=head)
        assert f"{sum(p.numel() for p in model.parameters()):,}" == count.rstrip(",")


def test_the_sizes_of_opteq_are_as_stated():
    stated = re.findall(
        r"^\| `(\S+)`([^|]*)\| (\d+) \|.*\| ([\d,]+) \|$", (ROOT / "docs" / "opteq.md").read_text(), re.M
    )
    assert [name for name, *_ in stated] == list(SIZES)
    for name, note, channels, count in stated:
        assert SIZES[name].channels == int(channels)
        side = {"imagenette": 256, "imagenet": 224}.get(name.partition("-")[0], 32)
        with torch.device("meta"):
            model = eq.models.MOptEq((3, side, side), 1000 if "1000" in note else 10, size=name)
        assert f"{sum(p.numel() for p in model.parameters()):,}" == count


def test_what_is_said_of_the_certificate_and_the_automatic_step_is_what_was_measured():
    folder = ROOT / "results" / "mondeq"
    certified = json.loads((folder / "mnist-fc-certified.json").read_text())
    assert certified["violations"] == 0
    assert f"none of {certified['inside']} attacks inside a certified radius succeeded" in SAID
    for name in ("figure2", "figure2-fc"):
        for run in json.loads((folder / f"{name}.json").read_text())["runs"]:
            assert run["summary"]["forward"] == {"auto above best": 0, "not converged": 0}


def test_what_is_said_of_figure_6_is_what_was_measured():
    cifar, camvid = json.loads((ROOT / "results" / "mdeq" / "figure6.json").read_text())["runs"]
    first, second, third = cifar["summary"]["Broyden, trained"].values()
    ends = [cifar["curves"][f"{solver}, trained"]["mean"][-1] for solver in ("Broyden", "plain iteration")]
    assert f"after {first}, {second} and {third} evaluations of f with Broyden's method" in SAID
    assert f"ends at {ends[0]:.1e} after 50; plain iteration ends at {ends[1]:.3f}" in SAID
    assert f"takes {camvid['summary']['Broyden, trained']['0.1']} evaluations to 0.1" in SAID
    assert min(camvid["curves"]["plain iteration, trained"]["mean"]) > 0.5
    for run in (cifar, camvid):
        for solver in ("Broyden", "plain iteration"):
            assert min(run["curves"][f"{solver}, at initialisation"]["mean"]) > 0.2


def test_what_is_said_of_figure_7_is_what_was_measured():
    several, single = json.loads((ROOT / "results" / "mdeq" / "figure7.json").read_text())["runs"]
    scales = [several["curves"][name]["mean"] for name in ("8x8", "16x16", "32x32")]
    alone = single["curves"]["32x32"]["mean"]
    in_order = from_when_on([fine > middle > coarse for coarse, middle, fine in zip(*scales, strict=True)])
    ahead = from_when_on([max(of) < other for *of, other in zip(*scales, alone, strict=True)])
    ends = [f"{curve[-1]:.1e}" for curve in (*scales, alone)]
    assert f"lower resolutions first from evaluation {in_order} on" in SAID
    assert f"ends at {ends[0]}, {ends[1]} and {ends[2]} after 30" in SAID
    assert f"falls behind all of them at evaluation {ahead}" in SAID
    assert f"ends at {ends[3]}" in SAID


def from_when_on(holds):
    """The first place, counted from 1, after which something always holds."""
    return len(holds) + 1 - next((i for i, held in enumerate(reversed(holds)) if not held), len(holds))


def test_what_is_said_of_the_pair_of_193k_is_what_was_measured():
    ends = []
    for name in ("mopteq", "popteq"):
        log = (ROOT / "results" / "opteq" / f"single-{name}.log.jsonl").read_text().splitlines()
        (epoch,) = [record for record in map(json.loads, log) if record["kind"] == "epoch"]
        evaluations = [epoch["train"]["solver"][way]["evaluations"] / epoch["step"] for way in ("forward", "backward")]
        ends.append((epoch["test"]["accuracy"], epoch["val"]["accuracy"], *evaluations))
    tested, validated, forward, backward = zip(*ends, strict=True)
    assert f"is at {tested[0]:.2%} and POptEq at {tested[1]:.2%}" in SAID
    assert f"on the validation images: {validated[0]:.2%} and {validated[1]:.2%}" in SAID
    assert f"of MOptEq takes {forward[0]:.1f} + {backward[0]:.1f} evaluations" in SAID
    assert f"one of POptEq {forward[1]:.1f} + {backward[1]:.1f}" in SAID


def test_what_is_said_of_attacks_is_what_was_measured():
    measured = json.loads((ROOT / "results" / "opteq" / "robustness.json").read_text())
    models: dict[str, list] = {}
    for row in measured["rows"]:
        models.setdefault(row["label"], []).append(row)
    samples = measured["samples"]
    assert f"on {samples:,} test images, for models of seed {measured['seed']}" in SAID
    stated = []
    for label, measures in models.items():
        made = [(row["radius"], row["attack"]) for row in measures]
        assert made == [(radius, attack) for radius in (2, 8) for attack in ("pgd", "foolbox")]
        (clean,), robust = {row["accuracy"] for row in measures}, [row["robust accuracy"] for row in measures]
        assert all(abs(ours - theirs) < 0.005 for ours, theirs in (robust[:2], robust[2:]))  # "The two attacks agree"
        stated.append((clean, *robust))
        assert f"| {label} | {' | '.join(format(share, '.1%') for share in stated[-1])} |" in SAID
    for without, with_them in zip(*stated, strict=True):
        error = sum(share * (1 - share) / samples for share in (without, with_them)) ** 0.5
        assert abs(without - with_them) < 2 * error


def test_what_is_said_of_figure_2_is_what_was_measured():
    files = [ROOT / "results" / "opteq" / name for name in ("figure2.json", "figure2-seed-1.json")]
    (coupled, parallel), (again, parallel_again) = (
        [
            {name: numbers["mean"] for name, numbers in run["summary"].items()}
            for run in json.loads(file.read_text())["runs"]
        ]
        for file in files
    )

    def against(name, decimals=3):
        pairs = ((coupled, parallel), (again, parallel_again))
        return " and ".join(f"{one[name]:.{decimals}f} against {other[name]:.{decimals}f}" for one, other in pairs)

    assert f"those of POptEq with both seeds, {against('average H')}" in SAID
    assert coupled["average H"] > parallel["average H"]
    assert again["average H"] > parallel_again["average H"]
    assert f"a lower average D with only one of them, {against('average D')}" in SAID
    assert coupled["average D"] < parallel["average D"]
    assert again["average D"] > parallel_again["average D"]
    of_channels = [run["diagonal dominance"] for run in (coupled, again)]
    assert f"are {of_channels[0]:.2f} and {of_channels[1]:.2f} of the mean product of different ones" in SAID
    assert max(of_channels) < 1


def test_what_is_said_of_figure_3a_is_what_was_measured():
    measured = json.loads((ROOT / "results" / "opteq" / "figure3a.json").read_text())
    (run,), places = measured["runs"], [measured["eps"].index(size) for size in (0.1, 0.3)]
    perturbed, noise = (
        " and ".join(f"{run['accuracy'][kind]['mean'][i]:.1%}" for i in places)
        for kind in ("reconstructed", "bernoulli")
    )
    assert f"On {run['samples']:,} test images, accuracy is {run['clean accuracy']:.1%} without" in SAID
    assert f"{perturbed} with perturbations of 0.1 and 0.3, and {noise} with noise of the same size" in SAID


def test_what_is_said_of_figure_3b_is_what_was_measured():
    measured = json.loads((ROOT / "results" / "opteq" / "figure3b.json").read_text())
    without, with_them = measured["runs"]
    ahead = [a - b for a, b in zip(with_them["accuracy"], without["accuracy"], strict=True)]
    errors = zip(with_them["standard error"], without["standard error"], strict=True)
    assert measured["iterations"] == [0, 1, 2, 3, 5, 10, 20]
    assert min(ahead[1:]) > 0 > ahead[0]
    assert f"starts {-100 * ahead[0]:.1f} points lower" in SAID
    assert f"by at most {100 * max(ahead):.1f} points" in SAID
    assert all(abs(lead) < 2 * (a * a + b * b) ** 0.5 for lead, (a, b) in zip(ahead, errors, strict=True))


def test_what_is_said_of_figure_3c_is_what_was_measured():
    measured = json.loads((ROOT / "results" / "opteq" / "figure3c.json").read_text())
    assert [run["gamma"] for run in measured["augmented"]] == [0, 1e-7, 1e-6]
    first, second, third = [f"{run['accuracy']:.2%}" for run in measured["augmented"]]
    coupled = f"{measured['coupled']['accuracy']:.2%}"
    assert f"{first}, {second} and {third} for γ = 0, 1e-7 and 1e-6, and {coupled} for a MOptEq" in SAID
    beyond = json.loads((ROOT / "results" / "opteq" / "figure3c-1e-5.json").read_text())
    assert f"dominate the loss and accuracy drops to {beyond['test']['accuracy']:.2%}" in SAID
    runs = [measured["coupled"], *measured["augmented"]]
    assert all("16x16" in run["title"] for run in runs)
    for one, other in itertools.combinations(runs, 2):  # "No two of them differ by two standard errors"
        error = (one["standard error"] ** 2 + other["standard error"] ** 2) ** 0.5
        assert abs(one["accuracy"] - other["accuracy"]) < 2 * error


def test_what_is_said_of_figure_4a_is_what_was_measured():
    panels = json.loads((ROOT / "results" / "opteq" / "figure4a.json").read_text())["run"]["panels"]
    smooth, hard = (
        next(p["curves"] for p in panels if (p["solver"], p["sign"]) == ("Anderson", sign))
        for sign in ("smooth", "hard")
    )
    *counts, never = [curve["reached"]["1e-09"] for curve in smooth.values()]
    assert f"below 1e-9 after {', '.join(map(str, counts[:-1]))} and {counts[-1]} evaluations for λ = 0," in SAID
    assert never is None
    floors = [hard[name]["median"][-1] for name in ("1/C = 0.0625", "0.1")]
    assert f"stays at {floors[0]:.0e} for λ = 1/C and at {floors[1]:.0e} for 0.1" in SAID
    assert hard["0.01"]["high"][-1] > 1e-5
    assert min(min(panel["curves"]["1"]["low"]) for panel in panels) > 0.1


def jiio(name):
    return json.loads((ROOT / "results" / "jiio" / f"{name}.json").read_text())


def test_the_restored_faces_are_those_of_the_files():
    unsupervised, hundred = jiio("celeba-restoration"), jiio("celeba-100-restoration")

    def cell(measured, prefix, kind):
        psnr, ssim = (measured.get(f"{prefix}median {kind}{name}") for name in ("psnr", "ssim"))
        return "not run" if psnr is None else f"{psnr:.2f}, {ssim:.3f}"

    problems = {"inpaint 10 x 10": "", **{name: f"{name}: " for name in ("denoise 0.2", "denoise 0.4", "deblur 1.5")}}
    for name, prefix in {**problems, "upscale 2": "upscale 2: "}.items():
        cells = [cell(unsupervised, prefix, kind) for kind in ("given ", "plain ", "adam ", "")]
        assert f"| {name} | {' | '.join([*cells, cell(hundred, prefix, '')])} |" in SAID
    kept = [cell(measured, "", "filled ") for measured in (unsupervised, hundred)]
    assert f"| inpaint, known pixels kept | | | | {' | '.join(kept)} |" in SAID
    trainings = {
        "unsupervised": ("celeba-inpaint-40", "celeba-restoration"),
        "supervised, detached": ("celeba-inpaint-detached-40", "celeba-inpaint-detached-100"),
        "supervised, exact": ("celeba-inpaint-exact-40", "celeba-inpaint-exact-100"),
    }
    for name, files in trainings.items():
        numbers = [jiio(file)[f"median {kind}psnr"] for file in files for kind in ("", "filled ")]
        assert f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |" in SAID.replace("**", "")
    assert f"reconstructs the 500 test faces with {jiio('celeba-100-test')['psnr']:.2f} dB" in SAID
    distances = jiio("celeba-distance")
    parts = " for reconstructions, {:.2f} for samples, and {:.2f} for training images"
    expected = f"{distances['reconstructions']:.2f}" + parts.format(distances["samples"], distances["training"])
    assert expected in SAID


def test_the_accuracies_under_attack_are_those_of_the_files():
    names = {"clean images": "clean", "images attacked by PGD": "pgd", "images attacked by JIIO": "jiio"}
    metrics = ("accuracy", "accuracy under pgd", "accuracy under jiio", "robust accuracy")
    for title, name in names.items():
        test = jiio(f"mnist-{name}.result")["test"]
        shares = [*(test[metric] for metric in metrics), jiio(f"mnist-{name}-foolbox")["robust accuracy"]]
        assert f"| {title} | {' | '.join(f'{share:.1%}' for share in shares)} |" in SAID


def test_the_accuracies_of_few_shot_learning_are_those_of_the_files():
    def said(measured):
        return f"{100 * measured['accuracy']:.2f} ± {100 * measured['95% interval of accuracy (±)']:.2f}%"

    learned = jiio("omniglot.result")["test"]
    exact, detached = jiio("omniglot-exact-test"), jiio("omniglot-detached-test")
    assert f"**{said(learned)}**" in SAID
    assert f"{learned['support accuracy']:.1%} of the support images are fitted" in SAID
    nearest = jiio("omniglot-prototypes-test")["accuracy"]
    assert f"before joint optimisation is right for {nearest:.2%}" in SAID
    assert f"exact {said(exact)}, detached {said(detached)}" in SAID
    for name, learner in (("maml", "MAML"), ("reptile", "Reptile"), ("imaml", "iMAML, gradient descent")):
        result = jiio(f"omniglot-{name}.result")
        row = f"| {learner} | {result['parameters']:,} | {result['epochs']} of "
        assert re.search(rf"{re.escape(row)}\d+ \| {re.escape(said(result['test']))} \|", SAID)


def test_the_quality_of_the_clothes_is_that_of_the_file():
    test = jiio("fashion-mnist.result")["test"]
    assert f"a PSNR of {test['psnr']:.2f} dB and an SSIM of {test['ssim']:.3f}. These are samples" in SAID
