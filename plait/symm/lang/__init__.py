"""Device functions for kernels that talk to peers, as named patterns.

Every pattern holds on Triton 3.6 and later; a test reads the PTX that each emits for sm_90.

**Put, then signal** (`signal`). Stores of all threads of the block come before the word. Triton 3.6
to 3.8 put no CTA barrier before a scalar release atomic, so `signal` issues one itself; the release
is at system scope, for peers on other GPUs.

**Wait, then get** (`wait`). An acquire poll of one word, with a deadline and the group's abort flag;
loads of all threads after it see what came before the signal. Returns False when the wait was given
up: then write NaN and go on, never trap.

**Fence before a descriptor load** (`fence_proxy_async`). TMA reads through another proxy than plain
stores write; after a wait and before `desc.load` of what a peer wrote, and before telling a peer
that descriptor loads are done.

**Begin and finish** (`begin`, `finish`). `begin` (one block, before the call's other work) advances
the region's epoch once all peers have consumed the previous one. `finish` (every block of the
call's last kernel) lets the last block tell all peers that this region is consumed.

**Barrier** (`barrier`): signal every peer, wait for every peer; one block.

**Graphs.** Epochs live in device memory and only grow: a replay advances them as an eager call does,
nothing is zeroed, no host value is baked in.
"""
