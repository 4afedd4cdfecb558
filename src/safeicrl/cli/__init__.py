"""The command line: safeicrl train | sweep | collect | evaluate | export | compare | plot | reproduce | demo | ...

`entry` runs a command, each of the other files has the commands of one group, and `options` reads what they take.
"""

from safeicrl.cli.entry import COMMANDS, main

__all__ = ["COMMANDS", "main"]
