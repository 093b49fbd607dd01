#!/usr/bin/env python3
"""Other people's build systems take the library: each builds a project of tests/consume, which prints what the C
compiler's program prints. The tools see a copy of the files that a package needs, and no other file of the project.

TKV_TEST_STRICT=1: all tools must be here (.ci/integrations installs them). Without it the tools are not run: they take
minutes."""
import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import results
from programs import ROOT, STRICT, missing

# What a package needs of the project.
FILES = ["tieredkv.h", "examples/tieredkv.c", "LICENSE", "CMakeLists.txt", "meson.build", "build.zig", "build.zig.zon", "go.mod",
         "packaging", "tests/consume"]
FAST = "-O0 -DTKV_NO_SIMD -DTKV_CORE"  # the library compiles in 3 s, and the bytes of this cache are the same
CLEAN = {name: value for name, value in os.environ.items()
         if name not in ("CC", "CXX", "LDFLAGS", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH")}


def call(command, cwd, **environment):
    """Runs a tool and returns what it wrote. A failure shows all of it."""
    done = subprocess.run(command, cwd=cwd, env={**CLEAN, "CFLAGS": FAST, **environment}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise AssertionError("%s\n%s" % (" ".join(command), done.stdout))
    return done.stdout


class Consumer(unittest.TestCase):
    """A copy of the project's files in a folder, and the text that each consumer must print."""
    TOOLS = []

    @classmethod
    def setUpClass(cls):
        if not STRICT:
            raise unittest.SkipTest("the tools take minutes: TKV_TEST_STRICT=1 runs them")
        for tool in cls.TOOLS:
            if not shutil.which(tool):
                missing("%s is missing" % tool)
        cls.place = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.place, ignore_errors=True)
        cls.tree = os.path.join(cls.place, "a tree")  # people's paths have spaces
        for name in FILES:
            source, target = os.path.join(ROOT, name), os.path.join(cls.tree, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)

    def commit_tree(self):
        """Makes the copy a repository of git. Returns its address."""
        git = ["git", "-c", "user.name=test", "-c", "user.email=test", "-c", "init.defaultBranch=main"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "files"]):
            call(git + words, self.tree)
        return "file://" + self.tree

    def consume(self, *names):
        return os.path.join(self.tree, "tests", "consume", *names)

    def check(self, text):
        self.assertEqual(text, expected())


def library():
    """Returns an object of the library by the C compiler. `make test` has compiled one."""
    if "LIBRARY" not in os.environ:
        place = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, place)
        os.environ["LIBRARY"] = os.path.join(place, "tieredkv.o")
        call(["cc", *FAST.split(), "-c", "examples/tieredkv.c", "-o", os.environ["LIBRARY"]], ROOT)
    return os.path.join(ROOT, os.environ["LIBRARY"])


def expected(cache=[]):
    """Returns what the program prints that the C compiler makes."""
    if not cache:
        with tempfile.TemporaryDirectory() as place:
            program = os.path.join(place, "consume")
            call(["cc", "-I.", "tests/consume/consume.c", library(), "-o", program, "-lm"], ROOT)
            cache.append(call([program], ROOT))
    return cache[0]


class Text(unittest.TestCase):
    def test_text(self):
        """A thousand tokens are in three tiers, and attention over equal values gives that value."""
        said = re.fullmatch(r"(\d+) hot, (\d+) warm, (\d+) archive, (\d+) bytes, out 1\.0\n", expected())
        hot, warm, archive, total = map(int, said.groups())
        self.assertEqual(hot + warm + archive, 1000)
        self.assertGreater(min(hot, warm, archive), 0)
        self.assertLess(total, 1000 * 2 * 2 * 64 * 2)


class Cmake(Consumer):
    TOOLS = ["cmake", "git", "pkg-config"]

    def configure(self, source, build, *more):
        call(["cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", *more], self.place)
        call(["cmake", "--build", build], self.place)

    def install(self, name, *more):
        """Installs the library, and moves the installed tree elsewhere. Returns its place."""
        build, first, prefix = (os.path.join(self.place, name + end) for end in ("-build", "-first", ""))
        self.configure(self.tree, build, "-DCMAKE_INSTALL_PREFIX=" + first, *more)
        call(["cmake", "--install", build], self.place)
        os.rename(first, prefix)
        return prefix

    def test_install_find_package_and_pkg_config(self):
        prefix, build = self.install("static"), os.path.join(self.place, "found")
        self.configure(self.consume("cmake"), build, "-DCMAKE_PREFIX_PATH=" + prefix)
        self.check(call([os.path.join(build, "consume")], self.place))
        self.check(call([os.path.join(build, "consume_own")], self.place))
        self.compile_with_pkg_config(prefix, "tieredkv-implementation", [])
        self.compile_with_pkg_config(prefix, "tieredkv", [library()])

    def compile_with_pkg_config(self, prefix, package, more):
        [pc] = [folder for folder, _, names in os.walk(prefix) if package + ".pc" in names]
        words = call(["pkg-config", "--cflags", "--libs", package], self.place, PKG_CONFIG_PATH=pc).split()
        program = os.path.join(self.place, package)
        call(["cc", self.consume("consume.c"), *more, *words, "-o", program], self.place)
        self.check(call([program], self.place))

    def test_shared(self):
        """A shared library exports its functions, also where a project hides those of its own."""
        prefix = self.install("shared", "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_C_VISIBILITY_PRESET=hidden")
        build = os.path.join(self.place, "with-shared")
        self.configure(self.consume("cmake"), build, "-DCMAKE_PREFIX_PATH=" + prefix)
        self.check(call([os.path.join(build, "consume")], self.place))

    def test_fetch_content(self):
        build = os.path.join(self.place, "fetched")
        self.configure(self.consume("fetch"), build, "-DTIEREDKV_URL=" + self.commit_tree(), "-DTIEREDKV_TAG=main")
        self.check(call([os.path.join(build, "consume")], self.place))
        self.assertEqual(call(["cmake", "--install", build, "--prefix", build + "/prefix"], self.place).count("tieredkv"), 0)


class Meson(Consumer):
    TOOLS = ["meson", "ninja", "git", "pkg-config"]

    def test_wrap(self):
        wrap, build = self.consume("meson", "subprojects", "tieredkv.wrap"), os.path.join(self.place, "build")
        with open(wrap, encoding="utf-8") as f:
            text = f.read()
        with open(wrap, "w", encoding="utf-8") as f:
            f.write(text.replace("TIEREDKV_URL", self.commit_tree()))
        call(["meson", "setup", build, self.consume("meson"), "-Dtieredkv:default_library=static"], self.place)
        call(["meson", "compile", "-C", build], self.place)
        for program in ("consume", "consume_own"):
            self.check(call([os.path.join(build, program)], self.place))

    def test_install(self):
        build, prefix = os.path.join(self.place, "whole"), os.path.join(self.place, "prefix")
        call(["meson", "setup", build, self.tree, "--prefix", prefix, "--libdir", "lib", "--buildtype", "plain"], self.place)
        call(["meson", "install", "-C", build], self.place)
        path = {"PKG_CONFIG_PATH": os.path.join(prefix, "lib", "pkgconfig"), "LD_LIBRARY_PATH": os.path.join(prefix, "lib")}
        for package, more in (("tieredkv-implementation", []), ("tieredkv", [library()])):
            words = call(["pkg-config", "--cflags", "--libs", package], self.place, **path).split()
            program = os.path.join(self.place, package)
            call(["cc", self.consume("consume.c"), *more, *words, "-o", program], self.place)
            self.check(call([program], self.place, **path))


class Vcpkg(Consumer):
    TOOLS = ["cmake"]

    def test_portfile(self):
        """The port builds the library by functions that stand for vcpkg's."""
        prefix, build = os.path.join(self.place, "prefix"), os.path.join(self.place, "build")
        call(["cmake", "-DCURRENT_PORT_DIR=" + os.path.join(self.tree, "packaging", "vcpkg"), "-DCURRENT_PACKAGES_DIR=" + prefix,
              "-DBUILD=" + build, "-P", self.consume("vcpkg", "functions.cmake")], self.place)
        consumer = os.path.join(self.place, "consumer")
        call(["cmake", "-S", self.consume("cmake"), "-B", consumer, "-DCMAKE_PREFIX_PATH=" + prefix], self.place)
        call(["cmake", "--build", consumer, "--target", "consume"], self.place)
        self.check(call([os.path.join(consumer, "consume")], self.place))


class Conan(Consumer):
    TOOLS = ["conan", "cmake"]

    def test_create(self):
        home = {"CONAN_HOME": os.path.join(self.place, "conan")}
        call(["conan", "profile", "detect"], self.tree, **home)
        words = str(FAST.split())
        text = call(["conan", "create", "packaging/conan", "-s", "build_type=Debug", "-c", "tools.build:cflags=" + words],
                    self.tree, **home)
        self.assertEqual(text.count(expected()), 2)


class Zig(Consumer):
    def test_dependency(self):
        zig = shutil.which("zig")
        if not zig and subprocess.run([sys.executable, "-m", "ziglang", "version"], capture_output=True).returncode != 0:
            missing("zig is missing")
        call([*([zig] if zig else [sys.executable, "-m", "ziglang"]), "build", *("-Dflags=" + word for word in FAST.split())],
             self.consume("zig"), ZIG_GLOBAL_CACHE_DIR=os.path.join(self.place, "cache"))
        self.check(call([self.consume("zig", "zig-out", "bin", "consume")], self.place))


class Rust(Consumer):
    TOOLS = ["cargo"]
    CRATES = "/usr/share/cargo/registry"  # of Debian, with the crate cc

    def test_crate(self):
        home = os.path.join(self.place, "cargo")
        os.mkdir(home)
        if os.path.isdir(self.CRATES):
            with open(os.path.join(home, "config.toml"), "w", encoding="utf-8") as f:
                f.write('source.crates-io.replace-with = "debian"\nsource.debian.directory = "%s"\n' % self.CRATES)
        call(["cargo", "build", "--quiet"], self.consume("rust"), CARGO_HOME=home)
        self.check(call([self.consume("rust", "target", "debug", "consume")], self.place))

    def test_bindings(self):
        """bindings.rs is what bindgen.sh writes with bindgen 0.60, and Rust lays out each struct as the C compiler does."""
        crate = os.path.join(self.tree, "packaging", "rust", "tieredkv-sys")
        with open(os.path.join(crate, "src", "bindings.rs"), encoding="utf-8") as f:
            bindings = f.read()
        self.assertEqual(bindings.count("pub fn tkv_"), count_functions())
        structs = re.findall(r"^pub struct (tkv_\w+) \{\n((?:    pub \w+: [^;{}]+?,\n)+)\}", bindings, re.M)
        fields = [(name, field) for name, body in structs for field in re.findall(r"^    pub (\w+):", body, re.M)
                  if field != "_unused"]
        self.assertGreater(len(fields), 300)
        lines = ["let x = std::mem::MaybeUninit::<t::%s>::uninit(); let p = x.as_ptr(); println!(\"{} {}\", "
                 "std::mem::size_of::<t::%s>(), unsafe { std::ptr::addr_of!((*p).%s) as usize - p as usize });" %
                 (name, name, field) for name, field in fields]
        program = os.path.join(self.place, "layout")
        with open(program + ".rs", "w", encoding="utf-8") as f:
            f.write('#[path = "%s"] mod t;\nfn main() {\n%s\n}\n' %
                    (os.path.join(crate, "src", "bindings.rs"), "\n".join(lines)))
        call(["rustc", "--edition", "2021", program + ".rs", "-o", program], self.place)
        self.assertEqual(call([program], self.place), layout(self.place, [(n, f.rstrip("_")) for n, f in fields]))
        if not shutil.which("bindgen"):
            missing("bindgen is missing")
        if "bindgen 0.60." in call(["bindgen", "--version"], self.place):
            written = call([os.path.join(crate, "bindgen.sh")], self.place)
            self.assertEqual(*(re.sub(r"[\s,]", "", text) for text in (written, bindings)))  # rustfmt has versions


class Go(Consumer):
    TOOLS = ["go"]

    def go(self, place, *words):
        call(["go", *words], place, CGO_CFLAGS=FAST, GOCACHE=os.path.join(self.place, "go"), GOPROXY="off", GOFLAGS="-mod=mod")

    def test_module(self):
        self.go(self.consume("go"), "build", "-o", "consume", ".")
        self.check(call([self.consume("go", "consume")], self.place))

    def test_package(self):
        self.go(os.path.join(self.tree, "packaging", "go"), "test", ".")


class CSharp(Consumer):
    TOOLS = ["mcs", "mono"]

    def build(self, name, source):
        program = os.path.join(self.place, name)
        call(["mcs", "-warnaserror", "-out:" + program, os.path.join(self.tree, "packaging", "csharp", "TieredKV.cs"), source],
             self.place)
        return call(["mono", program], self.place, LD_LIBRARY_PATH=self.place)

    def test_program(self):
        shared = os.path.join(self.place, "libtieredkv.so")
        call(["cc", *FAST.split(), "-shared", "-fPIC", os.path.join(self.tree, "examples", "tieredkv.c"), "-o", shared, "-lm"],
             self.place)
        self.check(self.build("consume.exe", self.consume("csharp", "Consume.cs")))

    def test_layout(self):
        """Each struct has the fields of the header, where the C compiler puts them."""
        with open(os.path.join(self.tree, "packaging", "csharp", "TieredKV.cs"), encoding="utf-8") as f:
            structs = re.findall(r"^public struct (tkv_\w+) \{\n(.*?)^\}", f.read(), re.M | re.S)
        fields = [(name, field) for name, body in structs for names in re.findall(r"^    public \S+ ([\w, ]+);", body, re.M)
                  for field in names.split(", ")]
        self.assertGreater(len(fields), 25)
        lines = ['Console.WriteLine(Marshal.SizeOf(typeof(%s)) + " " + Marshal.OffsetOf(typeof(%s), "%s"));' % (n, n, f)
                 for n, f in fields]
        source = os.path.join(self.place, "Layout.cs")
        with open(source, "w", encoding="utf-8") as f:
            f.write("using System;\nusing System.Runtime.InteropServices;\nusing TieredKV;\nclass Layout {\n"
                    "static void Main() {\n%s\n}\n}\n" % "\n".join(lines))
        self.assertEqual(self.build("layout.exe", source), layout(self.place, fields))

    def test_sentinels(self):
        with open(os.path.join(self.tree, "packaging", "csharp", "TieredKV.cs"), encoding="utf-8") as f:
            numbers = dict(re.findall(r"\b(AllLayers|Unlimited) = (-\d+)", f.read()))
        with open(os.path.join(ROOT, "src", "api.h"), encoding="ascii") as f:
            header = dict(re.findall(r"#define TKV_(ALL_LAYERS|UNLIMITED) \((-\d+)\)", f.read()))
        self.assertEqual(numbers, {"AllLayers": header["ALL_LAYERS"], "Unlimited": header["UNLIMITED"]})


def count_functions():
    """Returns the number of public functions of the header."""
    with open(os.path.join(ROOT, "src", "prefix.h"), encoding="ascii") as f:
        names = set(re.findall(r"^#define (tkv_\w+) ", f.read(), re.M))
    with open(os.path.join(ROOT, "src", "api.h"), encoding="ascii") as f:
        return len(names & set(re.findall(r"^TKV_API [^;]*?\b(tkv_\w+)\(", f.read(), re.M)))


def layout(place, fields):
    """Returns a line for each (struct, field): the struct's size and the field's offset, by the C compiler."""
    program = os.path.join(place, "layout-c")
    with open(program + ".c", "w", encoding="utf-8") as f:
        f.write('#include "tieredkv.h"\n#include <stdio.h>\nint main(void) {\n%s\nreturn 0;\n}\n' % "\n".join(
            'printf("%%zu %%zu\\n", sizeof(%s), offsetof(%s, %s));' % (name, name, field) for name, field in fields))
    call(["cc", "-I" + ROOT, program + ".c", "-o", program], place)
    return call([program], place)


if __name__ == "__main__":
    os.chdir(ROOT)
    results.run()
