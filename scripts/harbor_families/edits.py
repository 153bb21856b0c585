"""Families that edit the lines of a file in place, and that make or fill one."""

from .parts import Made, answer, edit, family, file, files, is_text, phrases, text, words


@family("replace-word", "replace")
def replace_word(r):
    name, (old, new) = file(r), words(r, 2)
    before = phrases(r, r.randint(3, 5), (old,))
    after = [line.replace(old, new) for line in before]
    return edit(f"Replace every {old} with {new} in {name}.", name, before, after, f"sed -i 's/{old}/{new}/g' {name}")


@family("replace-on-line", "replace")
def replace_on_line(r):
    name, (old, new), at = file(r), words(r, 2), r.randint(2, 4)
    before = [f"{old} {other}" for other in words(r, 5)]
    after = [line.replace(old, new, 1) if n == at else line for n, line in enumerate(before, 1)]
    asked = f"On line {at} of {name}, replace {old} with {new}. Other lines stay."
    return edit(asked, name, before, after, f"sed -i '{at}s/{old}/{new}/' {name}")


@family("replace-in-two-files", "replace", "medium")
def replace_in_two_files(r):
    (one, two), (old, new) = files(r, 2), words(r, 2)
    given = {name: phrases(r, 3, (old,)) for name in (one, two)}
    checks = [is_text(name, [x.replace(old, new) for x in lines], lines) for name, lines in given.items()]
    asked = f"Replace every {old} with {new} in {one} and in {two}."
    return Made(asked, {n: text(x) for n, x in given.items()}, [f"sed -i 's/{old}/{new}/g' {one} {two}"], checks)


@family("replace-comma", "replace")
def replace_comma(r):
    name, (mark, said) = file(r, "csv"), r.choice(((";", "semicolon"), (":", "colon"), ("|", "bar")))
    before = [",".join(words(r, 3)) for _ in range(4)]
    after = [line.replace(",", mark) for line in before]
    asked = f"Replace every comma with a {said} ({mark}) in {name}."
    return edit(asked, name, before, after, f"sed -i 's/,/{mark}/g' {name}")


@family("delete-word", "replace")
def delete_word(r):
    name, (word,) = file(r), words(r, 1)
    before = [f"{word} {other}" for other in words(r, 4) if other != word]
    after = [line.replace(f"{word} ", "") for line in before]
    asked = f"Delete the word {word} and the space after it from all lines of {name}."
    return edit(asked, name, before, after, f"sed -i 's/{word} //g' {name}")


@family("delete-matching-lines", "delete-lines")
def delete_matching_lines(r):
    name, (word,) = file(r), words(r, 1)
    before = phrases(r, 5, (word,))
    after = [line for line in before if word not in line]
    return edit(f"Delete the lines of {name} that contain {word}.", name, before, after, f"sed -i '/{word}/d' {name}")


@family("delete-line", "delete-lines")
def delete_line(r):
    name, at, before = file(r), r.randint(2, 5), phrases(r, 6)
    after = before[: at - 1] + before[at:]
    return edit(f"Delete line {at} of {name}.", name, before, after, f"sed -i '{at}d' {name}")


@family("delete-first-lines", "delete-lines")
def delete_first_lines(r):
    name, count, before = file(r), r.randint(2, 4), phrases(r, 6)
    return edit(f"Delete the first {count} lines of {name}.", name, before, before[count:], f"sed -i '1,{count}d' {name}")


@family("delete-last-line", "delete-lines")
def delete_last_line(r):
    name, before = file(r), phrases(r, r.randint(3, 6))
    return edit(f"Delete the last line of {name}.", name, before, before[:-1], f"sed -i '$d' {name}")


@family("delete-empty-lines", "delete-lines")
def delete_empty_lines(r):
    name, after = file(r), phrases(r, 4)
    before = [part for line in after for part in (line, *[""] * r.randint(0, 2))]
    before.insert(1, "")
    return edit(f"Delete the empty lines of {name}.", name, before, after, f"sed -i '/^$/d' {name}")


@family("insert-before-line", "insert")
def insert_before_line(r):
    name, at, (word,), before = file(r), r.randint(2, 4), words(r, 1), phrases(r, 5)
    after = before[: at - 1] + [word] + before[at - 1 :]
    return edit(f"Insert the line {word} before line {at} of {name}.", name, before, after, f"sed -i '{at}i {word}' {name}")


@family("insert-after-line", "insert")
def insert_after_line(r):
    name, at, (word,), before = file(r), r.randint(1, 4), words(r, 1), phrases(r, 5)
    after = before[:at] + [word] + before[at:]
    return edit(f"Insert the line {word} after line {at} of {name}.", name, before, after, f"sed -i '{at}a {word}' {name}")


@family("insert-first", "insert")
def insert_first(r):
    name, (word,), before = file(r), words(r, 1), phrases(r, 3)
    asked = f"Insert the line {word} at the beginning of {name}."
    return edit(asked, name, before, [word, *before], f"sed -i '1i {word}' {name}")


@family("change-line", "insert")
def change_line(r):
    name, at, (word,), before = file(r), r.randint(2, 4), words(r, 1), phrases(r, 5)
    after = [word if n == at else line for n, line in enumerate(before, 1)]
    return edit(f"Change line {at} of {name} to {word}.", name, before, after, f"sed -i '{at}c {word}' {name}")


@family("prefix-lines", "mark-lines")
def prefix_lines(r):
    name, mark, before = file(r), r.choice(("> ", "- ", "* ", "# ")), phrases(r, 4)
    after = [mark + line for line in before]
    asked = f"Put a {mark[0]} and a space before every line of {name}."
    return edit(asked, name, before, after, f"sed -i 's/^/{mark}/' {name}")


@family("suffix-lines", "mark-lines")
def suffix_lines(r):
    name, mark, before = file(r), r.choice((";", ",", ".", "!")), phrases(r, 4)
    after = [line + mark for line in before]
    return edit(f"Put a {mark} behind every line of {name}.", name, before, after, f"sed -i 's/$/{mark}/' {name}")


@family("comment-lines", "mark-lines", "medium")
def comment_lines(r):
    name, (word,) = file(r, "conf"), words(r, 1)
    before = phrases(r, 4, (word,))
    after = [f"# {line}" if word in line else line for line in before]
    asked = f"Put a # and a space before the lines of {name} that contain {word}."
    return edit(asked, name, before, after, f"sed -i '/{word}/s/^/# /' {name}")


@family("uncomment-lines", "mark-lines")
def uncomment_lines(r):
    name, after = file(r, "conf"), phrases(r, 4)
    marked = r.randrange(4)
    before = [f"# {line}" if n == marked or r.random() < 0.4 else line for n, line in enumerate(after)]
    asked = f"Remove the # and the space at the beginning of lines of {name}."
    return edit(asked, name, before, after, f"sed -i 's/^# //' {name}")


@family("append-line", "write")
def append_line(r):
    name, said, before = file(r), " ".join(words(r, r.choice((1, 2)))), phrases(r, r.randint(1, 4))
    return edit(f"Append the line {said} to {name}.", name, before, [*before, said], f"echo {said} >> {name}")


@family("append-two-lines", "write", "medium")
def append_two_lines(r):
    name, (one, two), before = file(r), words(r, 2), phrases(r, 3)
    asked = f"Append the lines {one} and {two} to {name}."
    made = edit(asked, name, before, [*before, one, two], f"echo {one} >> {name}")
    made.solution.append(f"echo {two} >> {name}")
    return made


@family("create-file", "write")
def create_file(r):
    name, said = file(r), " ".join(words(r, r.choice((1, 2))))
    given = {answer(r): text(phrases(r, 2))}
    return Made(f"Create {name} with the line {said}.", given, [f"echo {said} > {name}"], [is_text(name, [said])])


@family("overwrite-file", "write")
def overwrite_file(r):
    name, said = file(r), " ".join(words(r, r.choice((1, 2))))
    asked = f"Overwrite {name} with the line {said}."
    return edit(asked, name, phrases(r, 3), [said], f"echo {said} > {name}")


@family("empty-file", "write")
def empty_file(r):
    name = file(r)
    return edit(f"Make {name} empty, but keep the file.", name, phrases(r, 3), [], f"truncate -s 0 {name}")


@family("set-option", "settings")
def set_option(r):
    name = file(r, "ini")
    keys = ["color", "level", "mode", "theme"]
    values = words(r, 5)
    at = r.randrange(4)
    before = [f"{key}={value}" for key, value in zip(keys, values)]
    after = [f"{keys[at]}={values[4]}" if n == at else line for n, line in enumerate(before)]
    command = f"sed -i 's/^{keys[at]}=.*/{keys[at]}={values[4]}/' {name}"
    return edit(f"Set {keys[at]} to {values[4]} in {name}.", name, before, after, command)


@family("rename-option", "settings")
def rename_option(r):
    name, keys, values = file(r, "ini"), words(r, 4), words(r, 3)
    before = [f"{key}={value}" for key, value in zip(keys, values)]
    at = r.randrange(3)
    after = [f"{keys[3]}={values[at]}" if n == at else line for n, line in enumerate(before)]
    asked = f"Rename the option {keys[at]} to {keys[3]} in {name}."
    return edit(asked, name, before, after, f"sed -i 's/^{keys[at]}=/{keys[3]}=/' {name}")


def settings(pairs):
    """A JSON file with a line for each key."""
    lines = [f'  "{key}": {value}' for key, value in pairs]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def json_task(r, asked, pairs, after, command):
    """A task that changes a JSON file; the form of the text does not count."""
    name = file(r, "json")
    check = {"type": "json", "path": name, "value": dict(after)}
    return Made(asked.format(name=name), {name: settings(pairs)}, [command.format(name=name)], [check])


@family("json-set", "settings")
def json_set(r):
    keys, numbers = words(r, 3), r.sample(range(10, 100), 4)
    pairs, at = list(zip(keys, numbers)), r.randrange(3)
    after = [(key, numbers[3] if n == at else value) for n, (key, value) in enumerate(pairs)]
    key, old, new = keys[at], numbers[at], numbers[3]
    asked = f"In {{name}}, change {key} from {old} to {new}."
    return json_task(r, asked, pairs, after, f"""sed -i 's/"{key}": {old}/"{key}": {new}/' {{name}}""")


@family("json-rename", "settings")
def json_rename(r):
    keys, numbers = words(r, 4), r.sample(range(10, 100), 3)
    pairs, at = list(zip(keys, numbers)), r.randrange(3)
    after = [(keys[3] if n == at else key, value) for n, (key, value) in enumerate(pairs)]
    asked = f"In {{name}}, rename the key {keys[at]} to {keys[3]}."
    return json_task(r, asked, pairs, after, f"""sed -i 's/"{keys[at]}"/"{keys[3]}"/' {{name}}""")


@family("swap-case-up", "case")
def upper_case(r):
    name, to, lines = file(r), answer(r), phrases(r, 3)
    after = [line.upper() for line in lines]
    asked = f"Write {name} in upper case to {to}."
    return Made(asked, {name: text(lines)}, [f"tr a-z A-Z < {name} > {to}"], [is_text(to, after)])


@family("swap-case-down", "case")
def lower_case(r):
    name, to, lines = file(r), answer(r), [line.upper() for line in phrases(r, 3)]
    after = [line.lower() for line in lines]
    asked = f"Write {name} in lower case to {to}."
    return Made(asked, {name: text(lines)}, [f"tr A-Z a-z < {name} > {to}"], [is_text(to, after)])
