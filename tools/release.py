#!/usr/bin/env python3
"""Makes a release of the tree: version, header, changelog, checks. It makes no commit and no tag, and prints both commands.

    python3 tools/release.py 0.2.0              in a clean working tree
    python3 tools/release.py 0.2.0 --dry-run    says what it would write, and writes nothing

1. The version goes into src/api.h, and into those files of PLACES that the tree has.
2. tieredkv.h and tieredkv_cuda.cu are made again, and so is tools/names/VERSION.txt, the public names. From then on a test
   wants each of these names in the header, or in a table of CHANGELOG.md, which tools/rename.py applies.
3. `## Unreleased` of CHANGELOG.md becomes `## VERSION, DATE`, with the SHA-256 of both files. The next change begins a new
   `## Unreleased` above it.
4. `make check` and tests/test_house.py run.

If a step fails, all files are as they were. Other files that have the old version are listed: perhaps they need a row in PLACES.
"""
import argparse
import datetime
import fnmatch
import hashlib
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRODUCTS = ("tieredkv.h", "tieredkv_cuda.cu")
VERSION = r"\d+\.\d+\.\d+"

# File and the pattern of its version; what stands in the first group stays. CMake, meson, Conan and setup.py read the header.
PLACES = [("src/api.h", r'(#define TKV_VERSION_STRING ")%s(?=")' % VERSION),
          ("packaging/*/bindings.rs", r'(pub const TKV_VERSION_STRING: &\[u8; \d+usize\] = b")%s(?=\\0")' % VERSION),
          ("packaging/*/Cargo.toml", r'(\[package\][^\[]*?\nversion = ")%s(?=")' % VERSION),
          ("packaging/*/vcpkg.json", r'("version": ")%s(?=")' % VERSION),
          ("build.zig.zon", r'(\.version = ")%s(?=")' % VERSION),
          ("README.md", r'(requires = "tieredkv/)%s(?=")' % VERSION),
          ("tests/consume/*/CMakeLists.txt", r"(find_package\(tieredkv )%s(?= )" % VERSION)]


class Refusal(Exception):
    pass


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", newline="") as f:
        return f.read()


def write(name, text):
    path = os.path.join(ROOT, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(text)


def run(*command):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Refusal("%s failed:\n%s" % (" ".join(command), done.stdout.decode(errors="replace").rstrip()))
    return done.stdout.decode(errors="replace")


def numbers(version):
    return tuple(int(n) for n in version.split("."))


def set_version(text, version):
    """The text of src/api.h, or of its bindings for Rust, with other numbers."""
    for name, number in zip(("MAJOR", "MINOR", "PATCH"), numbers(version)):
        text, n = re.subn(r"(TKV_VERSION_%s(?:: u32 =)? )\d+(?=;?\n)" % name, r"\g<1>%d" % number, text)
        if n != 1:
            raise Refusal("there are %d lines of TKV_VERSION_%s" % (n, name))
    major, minor, patch = numbers(version)
    text = re.sub(r"(TKV_VERSION_STRING: &\[u8; )\d+", r"\g<1>%d" % (len(version) + 1), text)
    return re.sub(r"(TKV_VERSION: u32 = )\d+", r"\g<1>%d" % (major * 10000 + minor * 100 + patch), text)


def places(version, files):
    """Name -> text of the files that have a version, with another one."""
    texts = {}
    for pattern, place in PLACES:
        for name in fnmatch.filter(files, pattern):
            text, n = re.subn(place, r"\g<1>" + version, read(name))
            if n:
                texts[name] = set_version(text, version) if "TKV_VERSION_MAJOR" in text else text
    if "src/api.h" not in texts:
        raise Refusal("src/api.h has no TKV_VERSION_STRING")
    return texts


def close_section(changelog, version, date, sums):
    """The changelog with `## Unreleased` as the section of a version."""
    if re.search(r"^## %s\b" % re.escape(version), changelog, re.M):
        raise Refusal("CHANGELOG.md has a section of %s already" % version)
    heading = re.search(r"^## Unreleased\n\n(?=\S)", changelog, re.M)
    if not heading or changelog[heading.end():heading.end() + 3] == "## ":
        raise Refusal("CHANGELOG.md has no section `## Unreleased` with something in it")
    lines = "".join("SHA-256 of %s: `%s`\\\n" % pair for pair in sums)[:-2] + "\n\n"
    return changelog[:heading.start()] + "## %s, %s\n\n%s" % (version, date, lines) + changelog[heading.end():]


def old_version():
    return re.search(r'#define TKV_VERSION_STRING "(%s)"' % VERSION, read("src/api.h")).group(1)


def left_behind(old, files, known):
    """Lines of other files that have the old version."""
    for name in files:
        if name in known or name in PRODUCTS + ("CHANGELOG.md",) or name.startswith("tools/names/"):
            continue
        try:
            text = read(name)
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # no text, or removed
        for i, line in enumerate(text.split("\n"), 1):
            if re.search(r"(?<![\d.])%s(?![\d.])" % re.escape(old), line):
                yield "%s:%d: %s" % (name, i, line.strip()[:100])


def sums():
    found = []
    for name in PRODUCTS:
        with open(os.path.join(ROOT, name), "rb") as f:
            found.append((name, hashlib.sha256(f.read()).hexdigest()))
    return found


def release(version, date, dry_run, check):
    if not re.fullmatch(VERSION, version):
        raise Refusal("%s is no version such as 0.2.0" % version)
    old = old_version()
    if numbers(version) < numbers(old):
        raise Refusal("%s is older than %s, the version of src/api.h" % (version, old))
    if run("git", "status", "--porcelain"):
        raise Refusal("the working tree is not clean: commit first (git status)")
    if run("git", "tag", "--list", "v" + version):
        raise Refusal("there is a tag v%s already" % version)
    files = run("git", "ls-files").splitlines()
    texts = places(version, files)
    close_section(read("CHANGELOG.md"), version, date, [])  # refuses before anything is written
    names = "tools/names/%s.txt" % version
    print("version %s -> %s in: %s" % (old, version, ", ".join(sorted(texts))))
    for line in left_behind(old, files, texts) if version != old else []:
        print("still %s: %s" % (old, line))
    changed = sorted(set(texts) | set(PRODUCTS) | {"CHANGELOG.md", names})
    if dry_run:
        print("would write: %s" % ", ".join(changed))
        return
    before = {name: read(name) if os.path.exists(os.path.join(ROOT, name)) else None for name in changed}
    try:
        make(version, date, texts, names, check)
    except BaseException:
        for name, text in before.items():
            if text is not None:
                write(name, text)
            elif os.path.exists(os.path.join(ROOT, name)):
                os.remove(os.path.join(ROOT, name))
        print("release.py: all files are as they were", file=sys.stderr)
        raise
    print("Read `git diff`, run EVERY=1 .ci/run, then:")
    print("    git add -A && git commit -m 'Version %s'" % version)
    print("    git tag -a v%s -m 'tieredkv %s' && git push --follow-tags" % (version, version))


def make(version, date, texts, names, check):
    """Writes the files of a release, and checks them."""
    for name, text in texts.items():
        write(name, text)
    run(sys.executable, "tools/amalgamate.py")
    write(names, run(sys.executable, "tools/rename.py", "--names", "src/api.h", "src/cuda/api.h"))
    write("CHANGELOG.md", close_section(read("CHANGELOG.md"), version, date, sums()))
    for name, digest in sums():
        print("%s  %s" % (digest, name))
    for command in (("make", "-s", "check"), (sys.executable, "tests/test_house.py")) if check else ():
        run(*command)
        print("ok: %s" % " ".join(command))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("version", metavar="VERSION")
    arguments.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments.add_argument("--date", default=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"))
    arguments.add_argument("--no-check", action="store_true", help="leave out make check and tests/test_house.py")
    options = arguments.parse_args()
    try:
        release(options.version, options.date, options.dry_run, not options.no_check)
    except Refusal as refusal:
        print("release.py: %s" % refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
