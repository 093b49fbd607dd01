const std = @import("std");

pub fn build(b: *std.Build) void {
    const target = b.standardTargetOptions(.{});
    const optimize = b.standardOptimizeOption(.{});
    const flags = b.option([]const []const u8, "flags", "Words for the C compiler of tieredkv") orelse &.{};
    const tieredkv = b.dependency("tieredkv", .{ .target = target, .optimize = optimize, .flags = flags });

    const main = b.createModule(.{ .root_source_file = b.path("main.zig"), .target = target, .optimize = optimize });
    main.addImport("tieredkv", tieredkv.module("tieredkv"));
    b.installArtifact(b.addExecutable(.{ .name = "consume", .root_module = main }));
}
