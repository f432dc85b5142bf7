"""Peak memory, from torch's own record of every allocation."""

import json

from torch.profiler import ProfilerActivity, profile


def peak_memory(run, file):
    """The most bytes held at once during ``run()``, whose result is kept; the record is written to ``file``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    assert kept is not None
    profiler.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most
