"""The end of a test program in Python: runs its tests, and prints the line that tests/run.sh adds up."""

import sys
import unittest


def run():
    result = unittest.main(exit=False, verbosity=1).result
    bad, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    for test, why in result.skipped:
        print("skipped %s: %s" % (test.id(), why))
    sys.stdout.flush()
    sys.stderr.flush()
    print("%d passed, %d failed%s" % (result.testsRun - bad - skipped, bad, ", %d skipped" % skipped if skipped else ""))
    sys.exit(bad != 0)
