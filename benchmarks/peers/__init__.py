"""The peers, each at the best settings we know for it and at the durability it is compared with.

Every function returns a rate (records or bytes a second) of its timed part; opening, creating and
closing a store are outside the clock.  Readers stay open between rounds, as ours does.
"""
