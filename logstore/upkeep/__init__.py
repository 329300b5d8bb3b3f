"""Work that rewrites or deletes files on request: compaction, repair, maintenance."""
