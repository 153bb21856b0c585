//! The Python code of an answer.
//!
//! An answer holds more than its solution: demos, outputs, shell commands, earlier versions. The names that
//! its tests use decide which blocks are the solution, with the blocks that those need in turn.

use crate::blocks::{Block, blocks};
use crate::pattern;
use crate::stated::tag;
use std::collections::BTreeSet;

/// Code that was taken from an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// The code.
    pub text: String,
    /// Number of the last block that was taken, from 1; 0 if the code is not a block.
    pub block: usize,
    /// Blocks that were joined.
    pub joined: usize,
    /// Blocks of the answer.
    pub blocks: usize,
}

pattern!(
    DEFINED,
    r"(?m)^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]+)?=[^=]|^(?:from[ \t]+\S+[ \t]+)?import[ \t]+([^\n#(]+|\([^)]*\))"
);
pattern!(
    OWN,
    r"(?m)^\s*(?:(?:async\s+)?(?:def|class)\s+(\w+)|(\w+)\s*(?::[^=\n]+)?=[^=])|\b(?:for|as)\s+(\w+)"
);
pattern!(
    STUB,
    r#"(?m)^(?:async[ \t]+)?def[ \t]+(\w+)[^\n]*:[ \t]*(?:\n[ \t]+)?(?:\.\.\.|pass)[ \t]*(?:#[^\n]*)?$"#
);
pattern!(IDENTIFIER, r"[\p{L}_][\p{L}\p{N}_]*");
pattern!(SESSION, r"(?m)^(?:>>> |In \[\d+\]:)");
pattern!(
    STATEMENT,
    r#"^(?:(?:async )?def |class |import |from \S+ import|for |while |if |elif |else:|try:|except|with |return|raise|assert|print\(|@|#|"""|'''|[\w.,\[\] ]+\s*[-+*/|&^%]?=[^=]|[\w.]+\(|\)|\]|\}|pass$|del |global )"#
);

/// The code of an answer. `tests`: a text in Python that uses it; its names decide between blocks.
pub fn code(answer: &str, tests: &str) -> Code {
    let answer = match tag(answer).filter(|inside| !inside.is_empty()) {
        Some(inside) if !blocks(inside).is_empty() || defines(inside, &names(tests)) => inside,
        _ => answer,
    };
    let all = blocks(answer);
    let names = names(tests);
    let fenced: Vec<usize> = (0..all.len()).filter(|i| all[*i].fenced).collect();
    let found = if fenced.is_empty() {
        let indented: Vec<usize> = (0..all.len()).collect();
        let wanted = !defines(answer, &names) && all.iter().any(|b| defines(&b.text, &names));
        wanted.then(|| chosen(&all, &indented, &names))
    } else {
        Some(chosen(&all, &fenced, &names))
    };
    match found {
        Some(taken) => {
            let texts: Vec<&str> = taken.iter().map(|i| all[*i].text.as_str()).collect();
            Code {
                text: texts.join("\n"),
                block: taken.last().map_or(0, |i| i + 1),
                joined: taken.len(),
                blocks: all.len(),
            }
        }
        None => Code {
            text: bare(answer, &names).to_owned(),
            block: 0,
            joined: 0,
            blocks: all.len(),
        },
    }
}

/// Names that a text uses and does not define itself. Names that it imports from the solution are not its
/// own.
fn names(tests: &str) -> BTreeSet<&str> {
    let Some(identifier) = IDENTIFIER.get() else {
        return BTreeSet::new();
    };
    let used = identifier.find_iter(tests).map(|m| m.as_str());
    let own: BTreeSet<&str> = OWN
        .all(tests)
        .filter_map(|c| c.get(1).or_else(|| c.get(2)).or_else(|| c.get(3)))
        .map(|m| &tests[m.range()])
        .collect();
    used.filter(|name| !own.contains(name)).collect()
}

/// Names that a block defines at its top level, except for those without a body.
fn defined(text: &str) -> BTreeSet<&str> {
    let stubs: BTreeSet<&str> = STUB
        .all(text)
        .filter_map(|c| c.get(1))
        .map(|m| &text[m.range()])
        .collect();
    let mut names = BTreeSet::new();
    for found in DEFINED.all(text) {
        if let Some(name) = found.get(1).or_else(|| found.get(2)) {
            names.insert(&text[name.range()]);
        }
        if let Some(list) = found.get(3) {
            for part in text[list.range()].split(',') {
                let part = part.trim_matches(|c: char| c.is_whitespace() || "()".contains(c));
                let name = part.rsplit(" as ").next().unwrap_or(part);
                names.insert(name.split('.').next().unwrap_or(name).trim());
            }
        }
    }
    names.retain(|name| !stubs.contains(name));
    names
}

fn defines(text: &str, names: &BTreeSet<&str>) -> bool {
    defined(text).iter().any(|d| names.contains(d))
}

/// The blocks that are the solution, in order.
fn chosen(all: &[Block], among: &[usize], names: &BTreeSet<&str>) -> Vec<usize> {
    let python = |i: &usize| all[*i].language == "python" && !SESSION.is_match(&all[*i].text);
    let unnamed = |i: &usize| all[*i].language.is_empty() && !SESSION.is_match(&all[*i].text);
    let likely: Vec<usize> = among
        .iter()
        .copied()
        .filter(|i| python(i) || unnamed(i))
        .collect();
    let wanted = |i: &&usize| defines(&all[**i].text, names);
    // A block in another language that defines the names is mislabelled.
    let pool: Vec<usize> = if likely.iter().any(|i| wanted(&i)) || !among.iter().any(|i| wanted(&i))
    {
        likely
    } else {
        among.to_vec()
    };
    let defined: Vec<(usize, BTreeSet<&str>)> =
        pool.iter().map(|i| (*i, defined(&all[*i].text))).collect();
    let last = |name: &str| {
        defined
            .iter()
            .rev()
            .find(|(_, d)| d.contains(name))
            .map(|(i, _)| *i)
    };
    let mut taken: BTreeSet<usize> = names.iter().filter_map(|name| last(name)).collect();
    if taken.is_empty() {
        let own = program(all, &pool, &defined).or_else(|| among.last().copied());
        taken.extend(own);
    }
    // Blocks that define what the taken ones use.
    loop {
        let own: BTreeSet<&str> = defined
            .iter()
            .filter(|(i, _)| taken.contains(i))
            .flat_map(|(_, d)| d.iter().copied())
            .collect();
        let texts = taken.iter().map(|i| all[*i].text.as_str());
        let used: BTreeSet<&str> = texts
            .flat_map(|text| {
                IDENTIFIER
                    .get()
                    .into_iter()
                    .flat_map(move |p| p.find_iter(text))
            })
            .map(|m| m.as_str())
            .collect();
        let more = used
            .iter()
            .filter(|name| !own.contains(*name))
            .filter_map(|name| last(name));
        let more: Vec<usize> = more.filter(|i| !taken.contains(i)).collect();
        if more.is_empty() {
            return taken.into_iter().collect();
        }
        taken.extend(more);
    }
}

/// The block that is a program where no names decide: the last one in Python that does more than use what
/// another block defines.
fn program(all: &[Block], pool: &[usize], defined: &[(usize, BTreeSet<&str>)]) -> Option<usize> {
    let looks = |i: &usize| {
        all[*i].language == "python" || all[*i].text.lines().any(|l| STATEMENT.is_match(l))
    };
    let is_demo = |i: &usize| {
        let text = all[*i].text.as_str();
        let own = self::defined(text);
        let others = defined
            .iter()
            .filter(|(j, _)| j < i)
            .flat_map(|(_, d)| d.iter());
        let used = IDENTIFIER.get().is_some_and(|p| {
            let used: BTreeSet<&str> = p.find_iter(text).map(|m| m.as_str()).collect();
            others
                .into_iter()
                .any(|d| used.contains(d) && !own.contains(d))
        });
        used && !text.contains("def ") && !text.contains("class ")
    };
    let code: Vec<usize> = pool.iter().copied().filter(looks).collect();
    let program = code
        .iter()
        .rev()
        .find(|i| !is_demo(i))
        .or(code.last())
        .copied();
    program.or_else(|| pool.last().copied())
}

/// Code without a fence: the answer from its first statement to its last, if it defines a needed name at the
/// top level; else all of it.
fn bare<'a>(answer: &'a str, names: &BTreeSet<&str>) -> &'a str {
    let span = answer.trim();
    let inline = span
        .strip_prefix('`')
        .and_then(|s| s.strip_suffix('`'))
        .filter(|s| !s.contains('`'));
    if let Some(inline) = inline {
        return inline;
    }
    if !defines(answer, names) {
        return answer;
    }
    let is_code = |line: &str| line.starts_with([' ', '\t']) || STATEMENT.is_match(line);
    let (mut start, mut end, mut at) = (None, 0, 0);
    for line in answer.split_inclusive('\n') {
        if start.is_none() && STATEMENT.is_match(line) {
            start = Some(at);
        }
        at += line.len();
        if start.is_some() && is_code(line) && !line.trim().is_empty() {
            end = at;
        }
    }
    answer.get(start.unwrap_or(0)..end).unwrap_or(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_one() {
        let all = [&DEFINED, &OWN, &STUB, &IDENTIFIER, &SESSION, &STATEMENT];
        assert!(all.iter().all(|p| p.get().is_some()));
    }

    #[test]
    fn names_decide_between_blocks() {
        let tests = "from solution import add\nresult = add(1, 2)\nassert result == 3";
        let right = "def add(a, b):\n    return a + b\n";
        let p = |text: &str| format!("```python\n{text}```\n");
        for answer in [
            right.to_owned(),
            p(right),
            p(right) + &p("result = add(1, 2)\nprint(result)\n"),
            p(right) + "```\n3\n```",
            p(right) + "```bash\npython add.py\n```",
            p("def add(a, b): ...\n") + &p(right),
            p(right) + &p("def add(a, b):\n    pass\n"),
            format!("Here:\n\n{right}\nIt adds."),
            format!("```text\n{right}```\n```json\n{{}}\n```"),
            format!("<answer>\n{}</answer>", p(right)),
        ] {
            let found = code(&answer, tests);
            assert_eq!(found.text.trim(), right.trim(), "{answer}");
        }
    }

    #[test]
    fn blocks_that_are_needed_are_joined() {
        let answer = "```py\nimport math\n```\n```py\ndef half(x):\n    return x / 2\n```\n```py\nprint(1)\n```\n```py\ndef f(x):\n    return math.floor(half(x))\n```";
        let found = code(answer, "assert f(3) == 1");
        assert_eq!((found.block, found.joined, found.blocks), (4, 3, 4));
        assert!(found.text.starts_with("import math\n\ndef half"));
    }

    #[test]
    fn without_names_a_program_counts_and_no_demo_of_it() {
        let program = "def main():\n    print(input())\nmain()\n";
        let answer =
            format!("```python\n{program}```\nUse:\n```bash\npython main.py\n```\n```\n3\n```");
        assert_eq!(code(&answer, "").text, program);
        assert_eq!(code("a = 1", "").text, "a = 1");
        assert_eq!(code("``` x", "").text, "``` x");
    }
}
