"""Profiles from TOML, and errors that name file and key on one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from farflung.devices import (
    CodingRates,
    DeviceProfile,
    LayerProfile,
    OccasionalStraggler,
    ScheduledStraggler,
    VaryingStraggler,
    find_device,
    format_device,
)
from farflung.devices import catalog as devices_module
from farflung.errors import ConfigError
from farflung.network import (
    BandwidthTrace,
    Link,
    Medium,
    NetworkProfile,
    Site,
    SiteLink,
    find_network,
    format_profile,
    load_profile,
)
from farflung.network import loading as loading_module

WHOLE = """
name = "office and field"
congestion = "cubic"
connections = "auto"
[default]
latency_s = 0.02
[[site]]
name = "office"
nodes = 2
inside = { latency_s = 0.0005, bandwidth_bps = 1e9 }
up_bps = 100e6
exit_bps = 50e6
[[site]]
name = "field"
medium = "cell"
[[link]]
from = "office"
to = "field"
both_ways = true
latency_s = 0.045
jitter_s = 0.01
bandwidth_bps = 20e6
loss = 0.001
shared = true
[[medium]]
name = "cell"
bandwidth_bps = "evening"
relayed = true
[[trace]]
name = "evening"
times_s = [0, 60]
bandwidth_bps = [20e6, 5e6]
end_s = 180
after = "repeat"
"""


def written(folder: Path, text: str, name: str = "net.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_all_of_the_format(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    link = Link(0.045, 20e6, 0.01, 0.001)
    trace = BandwidthTrace((0.0, 60.0), (20e6, 5e6), 180.0, "repeat", f"{path}: trace evening")
    wanted = NetworkProfile(
        "office and field",
        (Site("office", 2, Link(0.0005, 1e9), up_bps=100e6, exit_bps=50e6), Site("field", medium="cell")),
        (SiteLink("office", "field", link, True), SiteLink("field", "office", link, True)),
        (Medium("cell", trace, relayed=True),),
        Link(0.02),
        source=str(path),
        congestion="cubic",
        tcp_connections="auto",
    )
    assert load_profile(path) == find_network(str(path)) == wanted


def test_the_format_that_is_shown_is_the_format(tmp_path: Path) -> None:
    for module, load in ((loading_module, find_network), (devices_module, find_device)):
        assert module.__doc__ is not None
        shown = module.__doc__.partition(".. code-block:: toml\n\n")[2]
        text = "\n".join(line.removeprefix("    ") for line in shown.splitlines())
        if module is devices_module:  # it shows both ways of saying how fast a device is
            text = text.replace("forward_s = 0.004 ", "#").replace("backward_s = 0.009 ", "#")
        assert load(str(written(tmp_path, text))).name in ("office and field", "field camera")


def test_the_name_is_the_files(tmp_path: Path) -> None:
    path = written(tmp_path, "[default]\nlatency_s = 0.1\n[[site]]\nname = 'a'\n", "home.toml")
    assert load_profile(path).name == "home"


def test_a_trace_in_a_file(tmp_path: Path) -> None:
    written(tmp_path, "0,1e6\n2.5,5e5\n\n", "cell.csv")
    text = "[default]\nlatency_s = 0\nbandwidth_bps = 't'\n[[site]]\nname = 'a'\n"
    text += "[[trace]]\nname = 't'\nfile = 'cell.csv'\nend_s = 9"
    default = load_profile(written(tmp_path, text)).default
    assert default is not None
    assert isinstance(default.bandwidth_bps, BandwidthTrace)
    assert default.bandwidth_bps.times_s == (0.0, 2.5)
    assert default.bandwidth_bps.bandwidth_bps == (1e6, 5e5)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("latency_s = 0.045", "latency_s = -0.045", "link from office to field: latency_s = -0.045: must be"),
        ("latency_s = 0.045", "", "link from office to field: latency_s is missing"),
        (
            "bandwidth_bps = 20e6",
            "bandwidth_bps = 0",
            "link from office to field: bandwidth_bps = 0.0: must be above 0",
        ),
        (
            "bandwidth_bps = 20e6",
            "bandwidth_bps = '1M'",
            "link from office to field: bandwidth_bps = '1M': no trace",
        ),
        (
            "bandwidth_bps = 20e6",
            "bandwidth_bps = true",
            "link from office to field: bandwidth_bps = True: must be a",
        ),
        (
            "bandwidth_bps = 20e6",
            "bandwith_bps = 20e6",
            "link from office to field: unknown key 'bandwith_bps'; did you mean bandwidth_bps?",
        ),
        ('"cubic"', '"vegas"', "congestion = 'vegas': must be one of bbr, cubic, reno"),
        ('"cubic"', "1", "congestion = 1: must be a string"),
        ('"auto"', "0", "connections = 0.0: must be from 1 to 64, or auto"),
        ('"auto"', "inf", "connections = inf: must be from 1 to 64, or auto"),
        ('"auto"', "true", "connections = True: must be a number"),
        ("loss = 0.001", "loss = 1.5", "link from office to field: loss = 1.5: must be"),
        ("shared = true", "shared = 1", "link from office to field: shared = 1: must be true or false"),
        ('to = "field"', 'to = "sea"', "link from office to sea: no site is named 'sea'"),
        ('to = "field"', "", "link 1: to is missing"),
        ("nodes = 2", "nodes = 0", "site office: nodes = 0: must be from 1 to 1,000,000"),
        ("nodes = 2", f"nodes = {10**20 - 1}", f"nodes = {10**20 - 1}: must be from 1 to 1,000,000"),
        ("nodes = 2", "nodes = 2.5", "site office: nodes = 2.5: must be a whole number"),
        ("up_bps = 100e6", "up_bps = nan", "site office: up_bps = nan: must be a number"),
        ('name = "office"\n', "", "site 1: name is missing"),
        ("latency_s = 0.0005", "latency_s = -1", "site office: inside: latency_s = -1.0: must be"),
        ("inside = {", "inside = 5 #", "site office: inside = 5: must be a table"),
        ('medium = "cell"', 'medium = "air"', "site field: medium: none is named 'air'"),
        ("[[medium]]", "[medium]", "medium = .*: must be written as \\[\\[medium\\]\\]"),
        ("end_s = 180", "end_s = 60", "trace evening: end_s = 60.0: must be after the last of times_s"),
        ("end_s = 180", "", "trace evening: end_s is missing"),
        ("times_s = [0, 60]", "times_s = [0, 60, 70]", "trace evening: 3 times_s and 2 bandwidth_bps"),
        ("times_s = [0, 60]", "times_s = 5", "trace evening: times_s = 5: must be a list"),
        ("[20e6, 5e6]", "[20e6, -5e6]", "trace evening: bandwidth_bps = -5000000.0: must be"),
        ('"repeat"', '"stop"', "trace evening: after = 'stop': must be one of error, hold, repeat"),
        ("times_s = [0, 60]", "file = 'none.csv'", "trace evening: .*none.csv: cannot be read"),
        ('name = "office and field"', "name = 3", "name = 3: must be a string"),
        ('name = "office and field"', "colour = 3", "unknown key 'colour'"),
        ('name = "office and field"', "name = ", "not TOML"),
    ],
)
def test_one_line_with_file_and_key(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in WHOLE
    path = written(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"^{path}: .*{what}") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_a_pair_that_cannot_reach_each_other(tmp_path: Path) -> None:
    text = WHOLE.replace("[default]\nlatency_s = 0.02\n", "").replace("both_ways = true\n", "")
    text = text.replace('medium = "cell"', 'nodes = 1\nmedium = "cell"')
    path = written(tmp_path, text)
    with pytest.raises(
        ConfigError, match=f"^{path}: office and field: link: none leads from field to office$"
    ):
        load_profile(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read .No such file"):
        find_network(str(tmp_path / "none.toml"))


# --- devices ----------------------------------------------------------------------------------------------------

CAMERA = """
name = "camera"
forward_s = 0.004
backward_s = 0.009
optimizer_s = 0.001
step_s = 0.002
slowdown = 1.5
memory_nbytes = 4000
cores = 1.5
message_s = 0.0001
encrypt_s_per_byte = 2e-9
[[coding]]
operation = "encode"
method = "topk(density=0.1)"
numel = [1024, 4096]
seconds = [1e-5, 3e-5]
[[coding]]
operation = "add"
numel = [1024]
seconds = [1e-6]
[[occasional]]
probability = 0.05
factor = 4
[[varying]]
spread = 0.1
[[scheduled]]
begin_s = 60
end_s = 120
factor = 3
ranks = [2]
"""


def test_a_device(tmp_path: Path) -> None:
    path = written(tmp_path, CAMERA)
    stragglers = (
        OccasionalStraggler(0.05, 4.0),
        VaryingStraggler(0.1),
        ScheduledStraggler(60.0, 120.0, 3.0, (2,)),
    )
    points = {("encode", "topk(density=0.1)"): ((1024, 1e-5), (4096, 3e-5)), ("add", ""): ((1024, 1e-6),)}
    coding = CodingRates(points, message_s=1e-4, encrypt_s_per_byte=2e-9)
    wanted = DeviceProfile(
        "camera", 0.004, 0.009, 0.001, (), 1.5, stragglers, 4000, str(path), coding, 1.5, 0.002
    )
    assert find_device(str(path)) == wanted
    written(tmp_path, format_device(wanted))
    assert find_device(str(path)) == replace(wanted, stragglers=())


def test_a_device_in_layers_or_by_its_operations(tmp_path: Path) -> None:
    layers = "[[layer]]\nnumel = 5\nforward_s = 1\nbackward_s = 2\n" * 2
    assert find_device(str(written(tmp_path, layers))).layers == (LayerProfile(5, 1.0, 2.0),) * 2
    path = written(tmp_path, "flops_per_s = 1e9")
    assert find_device(str(path), forward_flops=5e6).forward_s == 0.005
    with pytest.raises(ConfigError, match=f"{path}: known by its operations per second"):
        find_device(str(path))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("forward_s = 0.004", "forward_s = -1", "forward_s = -1.0: must be"),
        ("forward_s = 0.004", "", "forward_s is missing"),
        ("forward_s = 0.004", "flops_per_s = 0", "flops_per_s = 0.0: must be above 0"),
        ("slowdown = 1.5", "slowdown = 0", "slowdown = 0.0: must be above 0"),
        ("slowdown = 1.5", "speed = 2", "unknown key 'speed'"),
        ("memory_nbytes = 4000", "memory_nbytes = 0", "memory_nbytes = 0: must be"),
        ("probability = 0.05", "probability = 2", "occasional 1: probability = 2.0: must be in"),
        ("factor = 4", "factor = inf", "occasional 1: factor = inf: must be above 0"),
        ("spread = 0.1", "spread = -1", "varying 1: spread = -1.0"),
        ("end_s = 120", "end_s = 50", "scheduled 1: begin_s = 60.0"),
        ("ranks = [2]", "ranks = [0.5]", "scheduled 1: ranks = .*: must be a list of whole numbers"),
        (
            "ranks = [2]",
            "[[layer]]\nnumel = 1\nforward_s = 1\nbackward_s = 1",
            "layers: give them or forward_s",
        ),
        ("cores = 1.5", "cores = 0", "cores = 0.0: must be above 0"),
        ("message_s = 0.0001", "message_s = -1", "message_s = -1.0: must be a number of seconds"),
        ("message_s = 0.0001", "copy_s_per_byte = inf", "copy_s_per_byte = inf: must be a number of seconds"),
        ('operation = "add"', "", "coding 2: operation is missing"),
        ("numel = [1024]", "", "coding 2: numel is missing"),
        ("numel = [1024]", "numel = [1024.0]", "coding 2: numel = .*: must be a list of whole numbers"),
        ("numel = [1024]", "numel = [0]", r"coding 2: numel = \[0\]: must be whole numbers above 0"),
        ("[1024, 4096]", "[4096, 1024]", r"coding 1: numel = \[4096, 1024\]: .*, each above the one before"),
        ("[1024, 4096]", "[1024]", "coding 1: numel has 1 entries and seconds 2: give each size one time"),
        ("[1e-6]", "[0]", r"coding 2: seconds = \[0.0\]: each must be above 0"),
        ("[1e-6]", "[nan]", "coding 2: seconds = nan: must be a number"),
        ("[1e-6]", "[1e-6]\nrank = 1", "coding 2: unknown key 'rank'"),
        (
            'operation = "add"',
            'operation = "encode"\nmethod = "topk(density=0.1)"',
            r"coding 2: operation 'encode' of method 'topk\(density=0.1\)' is there already",
        ),
        ("ranks = [2]", "[[layer]]\nforward_s = 1\nbackward_s = 1", "layer 1: numel is missing"),
    ],
)
def test_a_wrong_device(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in CAMERA
    path = written(tmp_path, CAMERA.replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"^{path}: .*{what}") as caught:
        find_device(str(path), forward_flops=1.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a \N{ROCKET}", 'a "quoted" one', "two\nlines", "a\x7fb"])
def test_written_profile_can_be_read(tmp_path: Path, name: str) -> None:
    link = Link(0.0, 1e6)
    sites = (Site(name, 1), Site("other", 1))
    links = (SiteLink(name, "other", link), SiteLink("other", name, link))
    profile = NetworkProfile(name, sites=sites, site_links=links)
    (path := tmp_path / "net.toml").write_text(format_profile(profile, [f"measured at {name}"]), "utf-8")
    loaded = load_profile(path)
    assert (loaded.name, loaded.sites[0].name, loaded.site_links[0].link) == (name, name, link)
    assert "latency_s = 0.0" in path.read_text("utf-8")
    device = DeviceProfile(name=name)
    (path := tmp_path / "device.toml").write_text(format_device(device, comments=[name]), "utf-8")
    assert find_device(str(path)).name == name
