"""The speed bars: what logstore does, beside its peers, as ratios inside one run.

`python -m benchmarks` runs them; `benchmarks/README.md` says how each is measured.  A bar is a
function in `benchmarks.bars`, found by itself; a peer is a module in `benchmarks.peers`.
Nothing here is part of the installed package.
"""
