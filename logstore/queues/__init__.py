"""The work queue: messages of a topic that are leased, acknowledged and given back one by one."""
