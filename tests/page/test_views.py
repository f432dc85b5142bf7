"""What the views stream is what the library computes."""

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.page.views.inside import correlations
from equipoise.page.views.restore import degradation
from equipoise.page.views.scenes import drawn
from equipoise.page.views.view import ending
from page_server import STREET, picture, tensor


def digit(seed=0):
    """A blurred random drawing."""
    values = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
    smooth = F.avg_pool2d(values, 7, 1, 3)[0]
    return (255 * (smooth - smooth.min()) / (smooth.max() - smooth.min())).byte()


def asked(server, name, **fields):
    return {"model": server.model(name).name, **fields}


def draw(server, **changes):
    fields = {"solver": "peaceman-rachford", "step": 0, "second": "none", "second_step": 0}
    fields |= {"tolerance": 1e-6, "steps": 200}
    return asked(server, "draw", image=picture(digit()), **{**fields, **changes})


# Draw


def test_draw_streams_the_solve_and_ends_with_the_models_prediction(server, visitor):
    events = visitor.events("/draw/solve", draw(server, second="anderson", second_step=1.0))
    frames = [data for kind, data in events if kind == "frame"]
    ends = {data["lane"]: data for kind, data in events if kind == "end"}
    model = eq.load(server.model("draw").name)
    model.layer.tolerance = eq.Tolerance(relative=1e-6, max_steps=200)
    truth = model(digit()[None] / 255).softmax(1)[0]
    for lane in (0, 1):
        own = [frame for frame in frames if frame["lane"] == lane]
        assert [frame["step"] for frame in own] == list(range(1, ends[lane]["steps"] + 1))
        assert own[-1]["residual"] <= 1e-6 < own[-2]["residual"]
        assert ends[lane]["converged"]
        torch.testing.assert_close(torch.tensor(own[-1]["probabilities"]), truth, atol=1e-4, rtol=0)
        assert own[-1]["maps"]["count"] == 24
    certificate = events[-1][1]
    verdict = eq.models.mondeq.certificate.Certifier(model)(digit()[None] / 255)
    assert certificate["radius"] == pytest.approx(verdict.radii.item(), rel=1e-3)
    assert certificate["class"] == truth.argmax() == verdict.classes


def test_step_size_tolerance_and_steps_are_used(server, visitor):
    def end(**changes):
        return visitor.only("end", "/draw/solve", draw(server, **changes))[0]

    automatic, small = end(), end(step=0.05)
    assert small["steps"] > automatic["steps"]
    assert end(tolerance=1e-2)["steps"] < automatic["steps"]
    short = end(steps=2)
    assert short["steps"] == 2
    assert not short["converged"]
    assert short["message"].endswith("Allow more steps or increase the tolerance.")


def test_an_attack_stays_within_its_radius_and_fails_inside_the_certified_one(server, visitor):
    certificate = visitor.only("certificate", "/draw/solve", draw(server))[0]
    for radius in (0.9 * certificate["radius"], 5.0):
        events = visitor.events("/draw/attack", asked(server, "draw", image=picture(digit()), radius=radius))
        places = [data for kind, data in events if kind == "moved"]
        final = events[-1][1]
        assert len(places) == 21
        for place in [*places, final]:
            assert place["distance"] <= radius * (1 + 1e-5)
            assert place["x"] ** 2 + place["y"] ** 2 == pytest.approx(place["distance"] ** 2, abs=1e-9)
        assert tensor(final["picture"]).shape == (1, 28, 28)
        if radius < certificate["radius"]:
            assert final["after"] == final["before"] == certificate["class"]
            assert {place["class"] for place in places} == {certificate["class"]}


@pytest.mark.parametrize(
    ("controls", "advice"),
    [
        (("solver", "step", "tolerance", "steps"), " Allow more steps or increase the tolerance."),
        (("steps",), " Allow more steps."),
        ((), ""),
    ],
)
def test_a_failure_of_any_sample_is_told_with_remedies_that_the_view_offers(controls, advice):
    factor = torch.tensor([[0.0], [0.999]])
    options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(max_steps=5), "on_failure": "ignore"}
    end = ending(eq.fixed_point(lambda z, a: a * z + 1, torch.zeros(2, 1), factor, **options), 0.1, controls)
    assert not end["converged"]
    assert end["steps"] == 5
    assert end["message"] == f"the residual is still above the tolerance.{advice}"


# Restore and generate


def test_degradations_are_blur_then_hole_then_noise():
    image = torch.rand(1, 1, 12, 12)
    hole = torch.zeros(12, 12, dtype=torch.bool)
    hole[2:5, 3:7] = True
    blurred = eq.tasks.physics.GaussianBlur(1.5).A(image)
    noise = torch.randn(1, 1, 12, 12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(degradation(hole, 0.0, 1.5, 3)(image), torch.where(hole, 0.0, blurred))
    torch.testing.assert_close(degradation(hole, 0.5, 0.0, 3)(image), torch.where(hole, 0.0, image) + 0.5 * noise)
    torch.testing.assert_close(degradation(~hole & hole, 0.0, 0.0, 3)(image), image)


def test_restore_keeps_known_pixels_and_gives_adam_the_same_time(server, visitor):
    name = asked(server, "generator")
    example = visitor.only("examples", "/restore/examples", {**name, "seed": 1})[0]
    assert example["sampled"]
    image = tensor(example["pictures"][0])
    assert image.float().std() > 1
    hole = torch.zeros(1, 28, 28, dtype=torch.uint8)
    hole[:, 8:16, 10:20] = 255
    fields = {"image": picture(image), "hole": picture(hole), "noise": 0, "blur": 0, "steps": 25, "seed": 0}
    events = visitor.events("/restore/solve", {**name, **fields})
    given = tensor(next(data for kind, data in events if kind == "given")["picture"])
    assert bool((given[hole == 0] == image[hole == 0]).all())
    joint, adam = ([data for kind, data in events if kind == "frame" and data["lane"] == lane] for lane in (0, 1))
    ends = [data for kind, data in events if kind == "end"]
    assert [frame["step"] for frame in joint] == list(range(1, len(joint) + 1))
    assert min(frame["cost"] for frame in joint) < joint[0]["cost"]
    assert all(set(frame["kkt"]) == {"z", "mu", "x"} for frame in joint)
    assert adam[-2]["seconds"] <= ends[0]["seconds"] <= ends[1]["seconds"]  # stopped by the first step beyond it
    for end in ends:
        assert bool((tensor(end["picture"])[hole == 0] == image[hole == 0]).all())


def test_generated_images_are_those_of_the_generator(server, visitor):
    name = asked(server, "generator")

    def samples(seed):
        return visitor.only("end", "/generate/sample", {**name, "seed": seed})[0]["pictures"]

    first = samples(4)
    assert first == samples(4) != samples(5)
    assert len(first) == 12
    walk = {"seed": 4, "first": 2, "second": 7, "entry": 1, "move": 0}
    ends = [visitor.only("end", "/generate/image", {**name, **walk, "share": share})[0] for share in (0, 0.5, 1)]
    images = [tensor(end["pictures"][0]).int() for end in ends]
    for image, sample in ((images[0], first[2]), (images[2], first[7])):
        assert (image - tensor(sample).int()).abs().max() <= 3  # both are solved to the model's tolerance
    moved = visitor.only("end", "/generate/image", {**name, **walk, "share": 0, "move": 3})[0]
    assert (tensor(moved["pictures"][0]).int() - images[0]).abs().max() > 3


# Look inside


@pytest.mark.parametrize("solver", ["proximal-gradient", "fista", "anderson", "picard"])
def test_the_objective_falls_with_and_without_diversity(server, visitor, solver):
    name = asked(server, "inside")
    examples = visitor.only("examples", "/inside/examples", name)[0]
    assert not examples["known"]  # its data set is not there
    events = visitor.events("/inside/solve", {**name, "image": examples["pictures"][0], "solver": solver, "steps": 80})
    for lane, diversity in ((0, 0.01), (1, 0.0)):
        frames = [data for kind, data in events if kind == "frame" and data["lane"] == lane]
        end = next(data for kind, data in events if kind == "end" and data["lane"] == lane)
        heights = [frame["objective"] for frame in frames]
        assert end["diversity"] == diversity
        assert end["converged"]
        assert heights[-1] < heights[0]
        if solver == "proximal-gradient":
            slack = 1e-5 * (1 + abs(heights[-1]))
            assert all(after <= before + slack for before, after in pairwise(heights))
        heat = frames[-1]["heat"]
        assert (heat["count"], heat["height"], heat["width"]) == (3, 4, 4)


def test_correlations_are_cosines_of_channels():
    torch.manual_seed(0)
    z = tuple(torch.randn(1, 3, 4, 4, dtype=torch.float64) for _ in range(3))
    measured = correlations(z, 2)  # of branch 1 and branch 3
    for k in range(3):
        for l in range(3):
            a, b = z[0][0, k].flatten(), z[2][0, l].flatten()
            assert measured[k, l] == pytest.approx(abs(float(a @ b / (a.norm() * b.norm()))))


# Segment


def test_segments_like_the_task(server, visitor):
    served = server.model("segment")
    image = drawn(2, (3, 37, 53))[1]  # a size that has to be padded
    events = visitor.events("/segment/solve", asked(server, "segment", image=picture(image), steps=12))
    frames = [data for kind, data in events if kind == "frame"]
    end = events[-1][1]
    model = copy.deepcopy(served.original)
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-2, max_steps=12)
    truth = served.task.label_maps(model, served.prepared(image))[0]
    assert bool((tensor(end["labels"])[0] == truth).all())
    assert sum(end["shares"].values()) == pytest.approx(1)
    assert set(end["shares"]) <= set(STREET)
    assert all(len(frame["scales"]) == 2 for frame in frames)
    last = frames[-1]
    assert min(last["scales"]) <= last["residual"] <= max(last["scales"])


def test_drawn_scenes_are_the_same_at_every_call():
    one, two = drawn(3, (3, 60, 80)), drawn(3, (3, 60, 80))
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    assert drawn(1, (1, 28, 28)).shape == (1, 1, 28, 28)
