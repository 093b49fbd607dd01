"""The end of a test program in Python: runs its tests, and prints the line that tests/run.sh adds up."""

import sys
import unittest


def run():
    result = unittest.main(exit=False, verbosity=1).result
    bad, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    others = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors + result.skipped
              if isinstance(test, unittest.TestCase)}  # a class that does not begin is none of testsRun
    for test, why in result.skipped:
        print("skipped %s: %s" % (test.id(), why))
    sys.stdout.flush()
    sys.stderr.flush()
    print("%d passed, %d failed%s" % (result.testsRun - len(others), bad, ", %d skipped" % skipped if skipped else ""))
    sys.exit(bad != 0)
