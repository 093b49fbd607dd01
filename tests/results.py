"""The end of a test program in Python: runs its tests, and prints the line that tests/run.sh adds up. Each test that did not
run has a line of its own, `skipped NAME: reason`, also when its whole class or file was skipped, so that the count is true."""

import re
import sys
import unittest


def hidden_tests(holder):
    """Returns the names of the tests that did not run because setUpClass or setUpModule ended early."""
    kind, name = re.match(r"(\w+) \((.*)\)$", holder.id()).groups()
    module = sys.modules["__main__"]
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    if kind == "setUpClass":
        classes = [c for c in classes if "%s.%s" % (c.__module__, c.__qualname__) == name]
    return ["%s.%s" % (c.__qualname__, test) for c in classes for test in unittest.defaultTestLoader.getTestCaseNames(c)]


def run():
    result = unittest.main(exit=False, verbosity=1).result
    bad = len(result.failures) + len(result.errors)
    others = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors + result.skipped
              if isinstance(test, unittest.TestCase)}  # a class that does not begin is none of testsRun
    skipped = [(name, why) for test, why in result.skipped
               for name in ([test.id().replace("__main__.", "")] if isinstance(test, unittest.TestCase) else hidden_tests(test))]
    for name, why in skipped:
        print("skipped %s: %s" % (name, why))
    sys.stdout.flush()
    sys.stderr.flush()
    print("%d passed, %d failed%s" % (result.testsRun - len(others), bad, ", %d skipped" % len(skipped) if skipped else ""))
    sys.exit(bad != 0)
