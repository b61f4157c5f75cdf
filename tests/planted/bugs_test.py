#!/usr/bin/env python3
"""Tests of bugs.py on small sources."""
import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import bugs

SOURCE = """int f(int x) {
  x = 1;
  return x;
}
int g(int x) {
  x = 2;
  return x;
}
"""
PATCH = """--- a/kernels/a.cpp
+++ b/kernels/a.cpp
@@ -1,3 +1,3 @@
 int f(int x) {
-  x = 1;
+  x = Planted(Bug::kOne) ? 0 : 1;
   return x;
"""


class BugsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "sources"
        self.copies = pathlib.Path(folder.name) / "copies"
        self.patch = pathlib.Path(folder.name) / "bugs.patch"
        self.patch.write_text(PATCH)
        self.write("kernels/a.cpp", SOURCE)

    def write(self, file, text):
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        (self.root / file).write_text(text)

    def run_command(self, command, *known):
        """What the command prints."""
        switch = "".join(f'{{Bug::{bug}, "", true}},\n' for bug in known or ["kOne"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            bugs.main(command, self.copies, self.root, self.patch, switch)
        return printed.getvalue()

    def copy(self, file="kernels/a.cpp"):
        return (self.copies / file).read_text()

    def patched(self):
        return SOURCE.replace("x = 1", "x = Planted(Bug::kOne) ? 0 : 1")

    def test_applies_at_any_line(self):
        self.write("kernels/a.cpp", "// more\n// lines\n" + SOURCE)
        self.run_command("apply")
        self.assertEqual(self.copy(), "// more\n// lines\n" + self.patched())

    def test_changed_context_is_refused(self):
        self.write("kernels/a.cpp", SOURCE.replace("int f(int x)", "int f(long x)"))
        with self.assertRaisesRegex(bugs.PatchError, r"hunk 1 of kernels/a.cpp \(kOne\): its old lines occur 0 times"):
            self.run_command("apply")
        self.assertFalse(self.copies.exists())

    def test_ambiguous_place_is_refused(self):
        self.write("kernels/a.cpp", SOURCE + SOURCE)
        with self.assertRaisesRegex(bugs.PatchError, "hunk 1 of kernels/a.cpp .*occur 2 times"):
            self.run_command("apply")

    def test_missing_file_is_refused(self):
        (self.root / "kernels/a.cpp").unlink()
        with self.assertRaisesRegex(bugs.PatchError, "hunk 1 of kernels/a.cpp .*no such file"):
            self.run_command("check")

    def test_every_failed_hunk_is_named(self):
        self.patch.write_text(PATCH + "@@ -6,1 +6,1 @@\n-  x = 3;\n+  x = Planted(Bug::kThree);\n")
        self.write("kernels/a.cpp", "")
        with self.assertRaisesRegex(bugs.PatchError, r"(?s)hunk 1 of.*kOne.*hunk 2 of.*kThree"):
            self.run_command("apply")

    def test_a_bug_needs_a_hunk_and_a_name(self):
        self.run_command("check", "kOne")
        with self.assertRaisesRegex(bugs.PatchError, "kTwo is in planted_bug.cpp and in no hunk"):
            self.run_command("check", "kOne", "kTwo")
        with self.assertRaisesRegex(bugs.PatchError, "kOne is in a hunk and not in planted_bug.cpp"):
            self.run_command("check", "kTwo")

    def test_text_that_is_not_a_patch_is_refused(self):
        with self.assertRaisesRegex(bugs.PatchError, "line 2 of the patch"):
            bugs.parse("+++ b/kernels/a.cpp\nfoo\n")

    def test_refresh_follows_changed_context(self):
        self.write("kernels/a.cpp", SOURCE.replace("int f(int x)", "int f(long x)"))
        self.assertIn("hunk 1 of kernels/a.cpp (kOne): with less context", self.run_command("refresh"))
        self.assertIn("\n int f(long x) {\n-  x = 1;\n", self.patch.read_text())
        self.run_command("apply")

    def test_refresh_follows_moved_code(self):
        (self.root / "kernels/a.cpp").unlink()
        self.write("kernels/b/c.h", SOURCE)
        self.assertIn("hunk 1 of kernels/a.cpp (kOne): moved to kernels/b/c.h", self.run_command("refresh"))
        self.assertEqual(self.patch.read_text(), PATCH.replace("kernels/a.cpp", "kernels/b/c.h"))

    def test_refresh_places_the_changes_of_a_hunk_apart(self):
        self.write("kernels/a.cpp", SOURCE.replace("  return x;\n}\nint g", "  more();\n}\nint g"))
        self.patch.write_text(PATCH + " }\n-int g(int x) {\n+int g(int x, Bug::kTwo) {\n")
        self.run_command("refresh", "kOne", "kTwo")
        self.assertIn("  x = Planted(Bug::kOne) ? 0 : 1;\n  more();\n}\nint g(int x, Bug::kTwo) {\n", self.copy())

    def test_refresh_refuses_a_place_that_the_context_contradicts(self):
        self.write("kernels/a.cpp", SOURCE.replace("  return x;\n}\nint g", "  more();\n}\nint g"))
        self.patch.write_text("+++ b/kernels/a.cpp\n@@ @@\n   return x;\n-}\n+}  // Bug::kOne\n int g(int x) {\n")
        with self.assertRaisesRegex(bugs.PatchError, "has no place"):
            self.run_command("refresh")

    def test_refresh_needs_an_empty_folder(self):
        self.run_command("apply")
        with self.assertRaisesRegex(bugs.PatchError, "copies is not empty"):
            self.run_command("refresh")

    def test_refresh_keeps_the_patch_when_a_hunk_has_no_place(self):
        self.write("kernels/a.cpp", SOURCE.replace("x = 1", "x = 5"))
        with self.assertRaisesRegex(bugs.PatchError, r"hunk 1 of kernels/a.cpp \(kOne\) has no place"):
            self.run_command("refresh")
        self.assertEqual(self.patch.read_text(), PATCH)
        self.assertEqual(self.copy(), SOURCE.replace("x = 1", "x = 5"))  # to be edited by hand

    def test_save_keeps_the_patch_when_a_bug_is_missing(self):
        self.run_command("apply")
        (self.copies / "kernels/a.cpp").write_text(SOURCE)
        with self.assertRaisesRegex(bugs.PatchError, "kOne is in planted_bug.cpp and in no hunk"):
            self.run_command("save")
        self.assertEqual(self.patch.read_text(), PATCH)

    def test_save_writes_hunks_that_are_unique(self):
        self.write("kernels/a.cpp", SOURCE.replace("x = 2", "x = 1"))
        self.run_command("apply")
        edited = self.copy().replace("  x = 1;\n  return x;", "  x = Planted(Bug::kTwo) ? 0 : 1;\n  return x;")
        (self.copies / "kernels/a.cpp").write_text(edited)
        self.run_command("save", "kOne", "kTwo")
        self.assertEqual(bugs.bugs_in([self.patch.read_text()]), ["kOne", "kTwo"])
        (self.copies / "kernels/a.cpp").unlink()
        self.run_command("apply")
        self.assertEqual(self.copy(), edited)

    def test_save_joins_hunks_whose_context_overlaps(self):
        same = "  y();\n" * 6
        self.write("kernels/a.cpp", "void f() {\n" + same + "}\n")
        (self.copies / "kernels").mkdir(parents=True)
        one = "  z(Planted(Bug::kOne));\n"
        edited = "void f() {\n  y();\n  y();\n" + one + "  y();\n  y();\n" + one + "  y();\n  y();\n}\n"
        (self.copies / "kernels/a.cpp").write_text(edited)
        self.run_command("save")
        (self.copies / "kernels/a.cpp").unlink()
        self.run_command("apply")
        self.assertEqual(self.copy(), edited)

    def test_copies_that_did_not_change_keep_their_modification_time(self):
        self.run_command("apply")
        before = (self.copies / "kernels/a.cpp").stat().st_mtime_ns
        self.run_command("apply")
        self.assertEqual((self.copies / "kernels/a.cpp").stat().st_mtime_ns, before)


if __name__ == "__main__":
    unittest.main()
