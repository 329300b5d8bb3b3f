"""Files and directories: small checksummed files, the directory lock, the disk reserve."""
