"""Families that move files and change their permissions, and that repair small programs."""

from .parts import FOLDERS, Made, family, file, files, gone, is_text, output, phrases, text, words


@family("rename-file", "move")
def rename_file(r):
    (one, two), lines = files(r, 2), phrases(r, 2)
    return Made(f"Rename {one} to {two}.", {one: text(lines)}, [f"mv {one} {two}"], [gone(one), is_text(two, lines)])


@family("copy-file", "move")
def copy_file(r):
    (one, two), lines = files(r, 2), phrases(r, 2)
    return Made(f"Copy {one} to {two}.", {one: text(lines)}, [f"cp {one} {two}"], [is_text(two, lines)])


@family("back-up-file", "move")
def back_up_file(r):
    one, lines = file(r), phrases(r, 2)
    asked = f"Copy {one} to {one}.bak."
    return Made(asked, {one: text(lines)}, [f"cp {one} {one}.bak"], [is_text(f"{one}.bak", lines)])


@family("delete-file", "remove")
def delete_file(r):
    one, two = files(r, 2)
    given = {name: text(words(r, 2)) for name in (one, two)}
    return Made(f"Delete {one}. Keep {two}.", given, [f"rm {one}"], [gone(one)])


@family("delete-by-ending", "remove")
def delete_by_ending(r):
    ending = r.choice(("tmp", "bak", "log", "old"))
    names = files(r, 3)
    doomed = [f"{name[:-4]}.{ending}" for name in names[:2]]
    given = {name: text(words(r, 1)) for name in [*doomed, names[2]]}
    return Made(f"Delete all {ending} files.", given, [f"rm *.{ending}"], [gone(name) for name in doomed])


@family("delete-folder", "remove")
def delete_folder(r):
    folder, keep = r.choice(FOLDERS), file(r)
    given = {f"{folder}/{name}": text(words(r, 1)) for name in files(r, 2)}
    given[keep] = text(words(r, 2))
    asked = f"Delete the folder {folder} with all files in it."
    free = frozenset(name for name in given if name != keep)
    return Made(asked, given, [f"rm -r {folder}"], [gone(folder)], free)


@family("make-folder", "folder")
def make_folder(r):
    folder, given = r.choice(FOLDERS), {file(r): text(words(r, 2))}
    return Made(f"Make the folder {folder}.", given, [f"mkdir {folder}"], [{"type": "folder", "path": folder}])


@family("make-folders", "folder")
def make_folders(r):
    one, two = r.sample(FOLDERS, 2)
    given, path = {file(r): text(words(r, 2))}, f"{one}/{two}"
    asked = f"Make the folder {two} in a new folder {one}."
    return Made(asked, given, [f"mkdir -p {path}"], [{"type": "folder", "path": path}])


@family("move-into-new-folder", "folder", "medium")
def move_into_new_folder(r):
    name, folder, lines = file(r), r.choice(FOLDERS), phrases(r, 2)
    checks = [gone(name), is_text(f"{folder}/{name}", lines)]
    asked = f"Make the folder {folder} and move {name} into it."
    return Made(asked, {name: text(lines)}, [f"mkdir {folder}", f"mv {name} {folder}"], checks)


@family("copy-into-new-folder", "folder", "medium")
def copy_into_new_folder(r):
    name, folder, lines = file(r), r.choice(FOLDERS), phrases(r, 2)
    asked = f"Make the folder {folder} and copy {name} into it."
    checks = [is_text(f"{folder}/{name}", lines)]
    return Made(asked, {name: text(lines)}, [f"mkdir {folder}", f"cp {name} {folder}"], checks)


@family("move-into-folder", "folder")
def move_into_folder(r):
    (name, other), folder, lines = files(r, 2), r.choice(FOLDERS), phrases(r, 2)
    given = {name: text(lines), f"{folder}/{other}": text(words(r, 1))}
    checks = [gone(name), is_text(f"{folder}/{name}", lines)]
    return Made(f"Move {name} into the folder {folder}.", given, [f"mv {name} {folder}"], checks)


@family("move-by-ending", "folder", "medium")
def move_by_ending(r):
    ending, folder, names = r.choice(("log", "md", "csv")), r.choice(FOLDERS), files(r, 4)
    moved = {f"{name[:-4]}.{ending}": text(words(r, 2)) for name in names[:2]}
    given = {**moved, names[2]: text(words(r, 1)), f"{folder}/{names[3]}": text(words(r, 1))}
    checks = [check for n, t in moved.items() for check in (gone(n), is_text(f"{folder}/{n}", t))]
    return Made(f"Move all {ending} files into the folder {folder}.", given, [f"mv *.{ending} {folder}"], checks)


@family("link-file", "permission")
def link_file(r):
    (one, two), lines = files(r, 2), phrases(r, 2)
    check = {"type": "link", "path": two, "target": one}
    return Made(f"Make a symbolic link {two} to {one}.", {one: text(lines)}, [f"ln -s {one} {two}"], [check])


@family("make-executable", "permission")
def make_executable(r):
    name = file(r, "sh")
    given = {name: text(["#!/bin/sh", f"echo {r.choice(words(r, 3))}"])}
    check = {"type": "executable", "path": name, "is": True}
    return Made(f"Make {name} executable.", given, [f"chmod +x {name}"], [check])


@family("make-not-executable", "permission")
def make_not_executable(r):
    name = file(r, "sh")
    given = {name: text(["#!/bin/sh", f"echo {r.choice(words(r, 3))}"])}
    check = {"type": "executable", "path": name, "is": False}
    asked = f"Make {name} not executable."
    return Made(asked, given, [f"chmod -x {name}"], [check], executable=frozenset((name,)))


@family("make-read-only", "permission")
def make_read_only(r):
    name = file(r)
    check = {"type": "writable", "path": name, "is": False}
    return Made(f"Make {name} read-only.", {name: text(phrases(r, 2))}, [f"chmod a-w {name}"], [check])


def repair(asked, argv, before, says, command):
    """A program that fails or prints the wrong lines; its output counts, not its text."""
    return Made(asked, {argv[-1]: text(before)}, [command], [output(argv, says)])


@family("repair-shell-typo", "repair")
def repair_shell_typo(r):
    right, wrong = r.choice((("echo", "ehco"), ("echo", "ecoh"), ("printf", "pritnf"), ("expr", "exrp")))
    name, (one, two) = file(r, "sh"), words(r, 2)
    before = [f"{wrong} 2 + 3"] if right == "expr" else [f"{wrong} {one}", f"# {two}"]
    says = ["5"] if right == "expr" else [one]
    asked = f"In {name}, {wrong} must be {right}. Repair it."
    return repair(asked, ("sh", name), before, says, f"sed -i 's/{wrong}/{right}/' {name}")


@family("repair-python-typo", "repair")
def repair_python_typo(r):
    right, wrong = r.choice((("print", "pritn"), ("len", "lne"), ("sorted", "sroted"), ("max", "mxa")))
    name, (one, two) = file(r, "py"), words(r, 2)
    programs = {
        "print": (f'{wrong}("{one}")', one),
        "len": (f'print({wrong}("{one}"))', str(len(one))),
        "sorted": (f'print({wrong}(["{one}", "{two}"])[0])', min(one, two)),
        "max": (f"print({wrong}(3, {len(two)}))", str(max(3, len(two)))),
    }
    line, says = programs[right]
    asked = f"In {name}, {wrong} must be {right}. Repair it."
    return repair(asked, ("python3", name), [line], [says], f"sed -i 's/{wrong}/{right}/' {name}")


@family("repair-colon", "repair")
def repair_colon(r):
    name, count, (word,) = file(r, "py"), r.randint(2, 5), words(r, 1)
    before = [f"for i in range({count})", f'    print("{word}", i)']
    says = [f"{word} {i}" for i in range(count)]
    asked = f"In {name}, line 1 has no colon at its end. Repair it."
    return repair(asked, ("python3", name), before, says, f"sed -i '1s/$/:/' {name}")


@family("repair-number", "repair")
def repair_number(r):
    name, (key, other), (old, new, kept) = file(r, "py"), words(r, 2), r.sample(range(10, 100), 3)
    before = [f"{key} = {old}", f"{other} = {kept}", f"print({key} + {other})"]
    asked = f"In {name}, {key} is {old} and must be {new}. Repair it."
    return repair(asked, ("python3", name), before, [str(new + kept)], f"sed -i 's/{key} = {old}/{key} = {new}/' {name}")


@family("repair-operator", "repair")
def repair_operator(r):
    name, (one, two), (a, b) = file(r, "py"), words(r, 2), r.sample(range(10, 100), 2)
    before = [f"{one} = {a}", f"{two} = {b}", f"print({one} - {two})"]
    asked = f"In {name}, {one} - {two} must be {one} + {two}. Repair it."
    return repair(asked, ("python3", name), before, [str(a + b)], f"sed -i 's/{one} - {two}/{one} + {two}/' {name}")


@family("repair-quote", "repair")
def repair_quote(r):
    name, (word,) = file(r, "sh"), words(r, 1)
    before = [f'echo "{word}']
    asked = f'In {name}, line 1 has no " at its end. Repair it.'
    return repair(asked, ("sh", name), before, [word], f"sed -i '1s/$/\"/' {name}")
