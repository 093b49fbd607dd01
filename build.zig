// A module and a library for Zig and C programs (build.zig.zon has the package's name):
//
//     const tieredkv = b.dependency("tieredkv", .{ .target = target, .optimize = optimize });
//     exe.root_module.addImport("tieredkv", tieredkv.module("tieredkv"));       a Zig program: @import("tieredkv")
//     exe.root_module.linkLibrary(tieredkv.artifact("tieredkv"));               a C program: #include "tieredkv.h"
//
// .flags passes words to the C compiler, such as the switches of the manual's chapter 2.
const std = @import("std");

pub fn build(b: *std.Build) void {
    const target = b.standardTargetOptions(.{});
    const optimize = b.standardOptimizeOption(.{});
    const flags = b.option([]const []const u8, "flags", "Words for the C compiler, such as -DTKV_CORE") orelse &.{};

    const library = b.addLibrary(.{
        .name = "tieredkv",
        .root_module = b.createModule(.{ .target = target, .optimize = optimize, .link_libc = true }),
    });
    library.root_module.addCSourceFile(.{ .file = b.path("examples/tieredkv.c"), .flags = flags });
    library.installHeader(b.path("tieredkv.h"), "tieredkv.h");
    b.installArtifact(library);

    const source = b.path("tieredkv.h");
    const header = b.addTranslateC(.{ .root_source_file = source, .target = target, .optimize = optimize });
    header.addModule("tieredkv").linkLibrary(library);
}
