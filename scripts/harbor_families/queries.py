"""Families that sort, search, count and calculate."""

from .parts import Made, answer, ask, edit, family, file, files, phrases, text, words


def shuffled(r, lines):
    """The lines in an order that is not theirs, and not the reverse of it."""
    mixed = list(lines)
    while mixed in (list(lines), list(lines)[::-1]):
        r.shuffle(mixed)
    return mixed


def one_word_lines(r, count):
    """Lines of one word, out of order."""
    return shuffled(r, sorted(words(r, count)))


@family("sort-file", "sort")
def sort_file(r):
    name, before = file(r), one_word_lines(r, 5)
    return edit(f"Sort the lines of {name} in place.", name, before, sorted(before), f"sort -o {name} {name}")


@family("sort-reverse", "sort")
def sort_reverse(r):
    name, before = file(r), one_word_lines(r, 5)
    after = sorted(before, reverse=True)
    asked = f"Sort the lines of {name} in place in reverse order."
    return edit(asked, name, before, after, f"sort -r -o {name} {name}")


@family("sort-numbers", "sort")
def sort_numbers(r):
    name, numbers = file(r), shuffled(r, sorted(r.sample((2, 4, 7, 9, 13, 21, 58, 87, 104, 311, 560), 5)))
    before, after = [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
    asked = f"Sort the numbers of {name} in place by value."
    return edit(asked, name, before, after, f"sort -n -o {name} {name}")


@family("sort-unique", "sort")
def sort_unique(r):
    name, once = file(r), words(r, 4)
    before = shuffled(r, [*once, once[0], once[2]])
    asked = f"Sort the lines of {name} in place and drop duplicates."
    return edit(asked, name, before, sorted(once), f"sort -u -o {name} {name}")


@family("sort-into", "sort-into")
def sort_into(r):
    name, to, lines = file(r), answer(r), one_word_lines(r, 5)
    return ask(f"Write the sorted lines of {name} to {to}.", {name: text(lines)}, to, sorted(lines), f"sort {name} > {to}")


@family("sort-reverse-into", "sort-into")
def sort_reverse_into(r):
    name, to, lines = file(r), answer(r), one_word_lines(r, 5)
    after = sorted(lines, reverse=True)
    asked = f"Write the lines of {name}, sorted in reverse order, to {to}."
    return ask(asked, {name: text(lines)}, to, after, f"sort -r {name} > {to}")


@family("sort-numbers-into", "sort-into")
def sort_numbers_into(r):
    name, to = file(r), answer(r)
    numbers = shuffled(r, sorted(r.sample((3, 5, 8, 11, 17, 40, 96, 120, 505), 5)))
    after = [str(n) for n in sorted(numbers)]
    asked = f"Write the numbers of {name}, sorted by value, to {to}."
    return ask(asked, {name: text(numbers)}, to, after, f"sort -n {name} > {to}")


@family("sort-two-files", "sort-into", "medium")
def sort_two_files(r):
    (one, two), to = files(r, 2), answer(r)
    lines = words(r, 6)
    given = {one: text(lines[:3]), two: text(lines[3:])}
    asked = f"Write the lines of {one} and {two}, sorted together, to {to}."
    return ask(asked, given, to, sorted(lines), f"sort {one} {two} > {to}")


@family("join-files", "join")
def join_files(r):
    (one, two), to = files(r, 2), answer(r)
    first, second = phrases(r, 2), phrases(r, 3)
    asked = f"Write {one} and then {two} to {to}."
    return ask(asked, {one: text(first), two: text(second)}, to, first + second, f"cat {one} {two} > {to}")


@family("append-file", "join")
def append_file(r):
    one, two = files(r, 2)
    first, second = phrases(r, 2), phrases(r, 3)
    made = edit(f"Append the lines of {two} to {one}.", one, first, first + second, f"cat {two} >> {one}")
    made.files[two] = text(second)
    return made


@family("reverse-lines", "join")
def reverse_lines(r):
    name, to, lines = file(r), answer(r), phrases(r, 4)
    asked = f"Write the lines of {name} to {to}, the last one first."
    return ask(asked, {name: text(lines)}, to, lines[::-1], f"tac {name} > {to}")


@family("count-lines", "count")
def count_lines(r):
    name, to, lines = file(r), answer(r), phrases(r, r.randint(2, 9))
    asked = f"Write the number of lines of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, [str(len(lines))], f"wc -l < {name} > {to}")


@family("count-words", "count")
def count_words(r):
    name, to, lines = file(r), answer(r), phrases(r, r.randint(2, 9))
    count = sum(len(line.split()) for line in lines)
    asked = f"Write the number of words of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, [str(count)], f"wc -w < {name} > {to}")


@family("count-bytes", "count")
def count_bytes(r):
    name, to, lines = file(r), answer(r), phrases(r, r.randint(2, 6))
    asked = f"Write the number of bytes of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, [str(len(text(lines)))], f"wc -c < {name} > {to}")


@family("count-matches", "count")
def count_matches(r):
    name, to, (word,) = file(r), answer(r), words(r, 1)
    lines = phrases(r, 6, (word,))
    count = sum(word in line for line in lines)
    asked = f"Write the number of lines of {name} that contain {word} to {to}."
    return ask(asked, {name: text(lines)}, to, [str(count)], f"grep -c {word} {name} > {to}")


@family("find-lines", "find")
def find_lines(r):
    name, to, (word,) = file(r), answer(r), words(r, 1)
    lines = phrases(r, 6, (word,))
    after = [line for line in lines if word in line]
    asked = f"Write the lines of {name} that contain {word} to {to}."
    return ask(asked, {name: text(lines)}, to, after, f"grep {word} {name} > {to}")


@family("find-other-lines", "find")
def find_other_lines(r):
    name, to, (word,) = file(r), answer(r), words(r, 1)
    lines = phrases(r, 6, (word,))
    after = [line for line in lines if word not in line]
    asked = f"Write the lines of {name} that do not contain {word} to {to}."
    return ask(asked, {name: text(lines)}, to, after, f"grep -v {word} {name} > {to}")


@family("find-any-case", "find")
def find_any_case(r):
    name, to, (word,) = file(r), answer(r), words(r, 1)
    lines = phrases(r, 6, (word,))
    lines = [line.replace(word, word.upper()) if r.random() < 0.5 else line for line in lines]
    after = [line for line in lines if word in line.lower()]
    asked = f"Write the lines of {name} that contain {word}, in lower or upper case, to {to}."
    return ask(asked, {name: text(lines)}, to, after, f"grep -i {word} {name} > {to}")


@family("find-line-numbers", "find")
def find_line_numbers(r):
    name, to, (word,) = file(r), answer(r), words(r, 1)
    lines = phrases(r, 6, (word,))
    after = [f"{n}:{line}" for n, line in enumerate(lines, 1) if word in line]
    asked = f"Write the lines of {name} that contain {word}, with line numbers, to {to}."
    return ask(asked, {name: text(lines)}, to, after, f"grep -n {word} {name} > {to}")


@family("first-lines", "part")
def first_lines(r):
    name, to, count, lines = file(r), answer(r), r.randint(2, 5), phrases(r, 8)
    asked = f"Write the first {count} lines of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, lines[:count], f"head -n {count} {name} > {to}")


@family("last-lines", "part")
def last_lines(r):
    name, to, count, lines = file(r), answer(r), r.randint(2, 5), phrases(r, 8)
    asked = f"Write the last {count} lines of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, lines[-count:], f"tail -n {count} {name} > {to}")


@family("one-line", "part")
def one_line(r):
    name, to, at, lines = file(r), answer(r), r.randint(2, 6), phrases(r, 7)
    asked = f"Write line {at} of {name} to {to}."
    return ask(asked, {name: text(lines)}, to, [lines[at - 1]], f"sed -n {at}p {name} > {to}")


def table(r, rows):
    """Rows of a table: a word, a number and a color."""
    colors = r.sample(("red", "blue", "green", "yellow"), 2)
    picked = [r.choice(colors) for _ in range(rows - 2)] + colors
    return [f"{word},{r.randint(2, 90)},{color}" for word, color in zip(words(r, rows), picked)]


@family("csv-column", "table")
def csv_column(r):
    name, to, at, rows = file(r, "csv"), answer(r), r.randint(1, 3), table(r, 4)
    after = [row.split(",")[at - 1] for row in rows]
    asked = f"Write column {at} of {name} to {to}. Columns have commas between them."
    return ask(asked, {name: text(rows)}, to, after, f"cut -d, -f{at} {name} > {to}")


@family("csv-two-columns", "table", "medium")
def csv_two_columns(r):
    name, to, (one, two), rows = file(r, "csv"), answer(r), r.choice(((1, 2), (1, 3), (2, 3))), table(r, 4)
    after = [",".join(row.split(",")[i - 1] for i in (one, two)) for row in rows]
    asked = f"Write columns {one} and {two} of {name} to {to}. Columns have commas between them."
    return ask(asked, {name: text(rows)}, to, after, f"cut -d, -f{one},{two} {name} > {to}")


@family("csv-sum", "table", "medium")
def csv_sum(r):
    name, to, rows = file(r, "csv"), answer(r), table(r, r.randint(3, 6))
    total = sum(int(row.split(",")[1]) for row in rows)
    asked = f"Write the sum of column 2 of {name} to {to}. Columns have commas between them."
    return ask(asked, {name: text(rows)}, to, [str(total)], f"awk -F, '{{s+=$2}} END {{print s}}' {name} > {to}")


@family("csv-rows", "table", "medium")
def csv_rows(r):
    name, to, rows = file(r, "csv"), answer(r), table(r, 6)
    color = rows[-1].split(",")[2]
    after = [row for row in rows if row.endswith(f",{color}")]
    asked = f"Write the rows of {name} whose column 3 is {color} to {to}. Columns have commas between them."
    return ask(asked, {name: text(rows)}, to, after, f"""awk -F, '$3=="{color}"' {name} > {to}""")


@family("sum-numbers", "table")
def sum_numbers(r):
    name, to, numbers = file(r), answer(r), r.sample(range(3, 90), r.randint(3, 6))
    asked = f"Write the sum of the numbers of {name} to {to}."
    return ask(asked, {name: text(numbers)}, to, [str(sum(numbers))], f"awk '{{s+=$1}} END {{print s}}' {name} > {to}")


@family("list-files", "list")
def list_files(r):
    ending, other = r.sample(("txt", "md", "log", "csv"), 2)
    names, to = sorted(files(r, 4)), "answer.out"
    here = [f"{name[:-4]}.{ending}" for name in names[:3]]
    given = {name: text(words(r, 1)) for name in [*here, f"{names[3][:-4]}.{other}"]}
    asked = f"Write the names of the {ending} files to {to}, one on a line."
    return Made(asked, given, [f"ls *.{ending} > {to}"], [{"type": "text", "path": to, "text": text(here)}])


@family("count-files", "list")
def count_files(r):
    ending, other = r.sample(("txt", "md", "log", "csv"), 2)
    names, to, many = sorted(files(r, 6)), "answer.out", r.randint(2, 5)
    here = [f"{name[:-4]}.{ending}" for name in names[:many]]
    given = {name: text(words(r, 1)) for name in [*here, f"{names[5][:-4]}.{other}"]}
    asked = f"Write the number of {ending} files to {to}."
    return ask(asked, given, to, [str(many)], f"ls *.{ending} | wc -l > {to}")
