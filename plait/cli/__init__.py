"""The command line: one file per command, each with a function `command` or `add_commands`."""
