//! Reasoning and answer of a turn.
//!
//! Each model writes its thoughts in its own tags. A thought stands at the start of a turn or at the start of
//! a line, outside of fenced code. If the prompt ends with the opening tag, the turn has only the closing
//! one. gpt-oss names channels instead: `analysis` and `commentary` are thoughts, `final` is the answer.

/// Opening and closing mark of thoughts, and the name of the tag that they are.
const MARKS: [(&str, &str, &str); 13] = [
    ("<think>", "</think>", "think"),
    ("<thinking>", "</thinking>", "thinking"),
    ("<thought>", "</thought>", "thought"),
    ("<reasoning>", "</reasoning>", "reasoning"),
    ("<scratchpad>", "</scratchpad>", "scratchpad"),
    ("[THINK]", "[/THINK]", "think"),
    ("<seed:think>", "</seed:think>", "think"),
    ("◁think▷", "◁/think▷", "think"),
    ("<mm:think>", "</mm:think>", "think"),
    ("<|START_THINKING|>", "<|END_THINKING|>", "think"),
    ("<|begin_of_thought|>", "<|end_of_thought|>", "think"),
    ("<|inner_prefix|>", "<|inner_suffix|>", "think"),
    ("<think:opensource>", "</think:opensource>", "think"),
];
/// Marks of the channels of gpt-oss.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// Control tokens that end a message in a channel, or begin one.
const CHANNEL_ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", CHANNEL];

/// Whether a control token is a mark of thoughts, so that [`Turn::split`] needs its text.
pub fn is_thought_mark(token: &str) -> bool {
    let channels = [MESSAGE, "<|start|>", CHANNEL];
    channels.contains(&token) || MARKS.iter().any(|(o, c, _)| *o == token || *c == token)
}

/// Whether a turn is written in the channels of gpt-oss.
pub fn has_channels(text: &str) -> bool {
    text.contains(CHANNEL) && text.contains(MESSAGE)
}

/// A turn taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The thoughts without their marks. `None`: the turn has none.
    pub reasoning: Option<String>,
    /// The text after the thoughts; all of a turn without them. Empty if a thought is unfinished.
    pub answer: String,
    /// Name of the tag of the thought, such as `think`.
    pub tag: Option<&'static str>,
    /// Whether every thought was closed.
    pub finished: bool,
}

impl Turn {
    /// Takes a turn apart. `opened`: the prompt ended with the opening mark, so that the turn begins within a
    /// thought.
    pub fn split(text: &str, opened: bool) -> Self {
        if has_channels(text) {
            return channels(text);
        }
        let mut turn = Self {
            finished: true,
            ..Self::default()
        };
        let mut rest = text;
        // Deciding where lines are code takes time: turns without a mark have none to decide.
        match first_close(text, opened) {
            Some((tag, at, len)) => {
                let thought = text[..at].trim_start();
                let begun = MARKS
                    .iter()
                    .find_map(|(open, ..)| thought.strip_prefix(open));
                turn.think(begun.unwrap_or(thought), tag);
                rest = &text[at + len..];
            }
            None if opened => {
                turn.think(text, "think");
                turn.finished = false;
                return turn;
            }
            None => {}
        }
        while let Some((before, tag, inside, after)) = next_thought(rest) {
            turn.answer.push_str(before);
            turn.think(inside, tag);
            match after {
                Some(after) => rest = after,
                None => {
                    turn.finished = false;
                    turn.answer.clear();
                    return turn;
                }
            }
        }
        turn.answer.push_str(rest);
        if turn.reasoning.is_some() {
            turn.answer = turn.answer.trim_start().to_owned();
        }
        turn
    }

    /// A turn whose thoughts were taken out already, if it has any; else as [`Turn::split`].
    pub fn of_parts(reasoning: Option<&str>, text: &str) -> Self {
        match reasoning {
            Some(thought) => Self {
                reasoning: Some(thought.to_owned()),
                answer: text.to_owned(),
                tag: Some("think"),
                finished: !text.is_empty(),
            },
            None => Self::split(text, false),
        }
    }

    /// Returns the whole text of the model, with its reasoning in its tag. Unfinished reasoning has no
    /// closing tag.
    pub fn whole(&self) -> String {
        match (&self.reasoning, self.tag) {
            (Some(thought), Some(tag)) if self.finished => {
                format!("<{tag}>{thought}</{tag}>{}", self.answer)
            }
            (Some(thought), Some(tag)) => format!("<{tag}>{thought}"),
            _ => self.answer.clone(),
        }
    }

    /// Adds a thought.
    fn think(&mut self, text: &str, tag: &'static str) {
        let all = self.reasoning.get_or_insert_default();
        if !all.is_empty() {
            all.push_str("\n\n");
        }
        all.push_str(text.trim());
        self.tag.get_or_insert(tag);
    }
}

/// Tag, place and length of the first closing mark, if it stands before every opening one or ends a thought
/// that the prompt opened.
fn first_close(text: &str, opened: bool) -> Option<(&'static str, usize, usize)> {
    let found = MARKS.iter().filter_map(|(open, close, tag)| {
        let at = if opened {
            text.find(close)?
        } else {
            text.match_indices(close)
                .map(|(at, _)| at)
                .find(|at| is_mark(text, *at))?
        };
        let before = &text[..at];
        (opened || !before.contains(open)).then_some((*tag, at, close.len()))
    });
    found.min_by_key(|(_, at, _)| *at)
}

/// Whether a mark at a place is one: not quoted, and not in fenced code.
fn is_mark(text: &str, at: usize) -> bool {
    let before = &text[..at];
    let quoted = before.ends_with(['`', '"', '\'', '“', '‘', '«', '「']);
    let fences = before.lines().filter(|l| is_fence(l)).count();
    !quoted && fences % 2 == 0
}

fn is_fence(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("```") || line.starts_with("~~~")
}

/// The next thought at the start of a line: what stands before it, its tag, what is in it, and what follows
/// if it is closed.
fn next_thought(text: &str) -> Option<(&str, &'static str, &str, Option<&str>)> {
    let begins = |at: usize| {
        let line = text[..at].rsplit('\n').next().unwrap_or_default();
        line.trim().is_empty() && is_mark(text, at)
    };
    let found = MARKS.iter().filter_map(|(open, close, tag)| {
        let mut places = text.match_indices(open).map(|(at, _)| at);
        let at = places.find(|at| begins(*at))?;
        Some((at, open, close, *tag))
    });
    let (at, open, close, tag) = found.min_by_key(|(at, ..)| *at)?;
    let after = &text[at + open.len()..];
    let (inside, rest) = match after.split_once(close) {
        Some((inside, rest)) => (inside, Some(rest)),
        None => (after, None),
    };
    Some((&text[..at], tag, inside, rest))
}

/// Thoughts and answer of a turn in channels.
fn channels(text: &str) -> Turn {
    let mut turn = Turn::default();
    let mut answer = None;
    for part in text.split(CHANNEL).skip(1) {
        let Some((head, body)) = part.split_once(MESSAGE) else {
            continue;
        };
        let ends = CHANNEL_ENDS.iter().filter_map(|end| body.find(end));
        let body = &body[..ends.min().unwrap_or(body.len())];
        // A call of a tool names it behind the channel.
        match head.split_whitespace().next() {
            Some("final") => answer = Some(body),
            Some("commentary") if head.contains("to=") => {}
            _ => turn.think(body, "think"),
        }
    }
    turn.finished = answer.is_some();
    turn.answer = answer.unwrap_or_default().to_owned();
    turn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_no_part_of_the_answer() {
        let cases = [
            ("4", false, None, "4"),
            (" 4\n", false, None, " 4\n"),
            ("<think>2+2</think>\n\n4", false, Some("2+2"), "4"),
            ("2+2\n</think>\n\n4", true, Some("2+2"), "4"),
            ("<think>\n2+2\n</think>4", true, Some("2+2"), "4"),
            ("2+2\n</think>\n\n4", false, Some("2+2"), "4"),
            ("<think>\n\n</think>\n\n4", false, Some(""), "4"),
            ("a\n<think>b</think>\nc", false, Some("b"), "a\n\nc"),
            (
                "<think>a</think>b\n<think>c</think>d",
                false,
                Some("a\n\nc"),
                "b\nd",
            ),
            (
                "Write `</think>` at the end.",
                false,
                None,
                "Write `</think>` at the end.",
            ),
            ("So <think> is a tag", false, None, "So <think> is a tag"),
            (
                "```\n<think>a\n```\nb",
                false,
                None,
                "```\n<think>a\n```\nb",
            ),
            ("[THINK]a[/THINK]b", false, Some("a"), "b"),
        ];
        for (text, opened, reasoning, answer) in cases {
            let turn = Turn::split(text, opened);
            let found = (
                turn.reasoning.as_deref(),
                turn.answer.as_str(),
                turn.finished,
            );
            assert_eq!(found, (reasoning, answer, true), "{text}");
        }
    }

    #[test]
    fn an_unfinished_thought_has_no_answer() {
        for (text, opened) in [
            ("<think>the answer is 4", false),
            ("the answer is 4", true),
            ("Sure.\n<think>the answer is 4", false),
            ("<|channel|>analysis<|message|>the answer is 4", false),
        ] {
            let turn = Turn::split(text, opened);
            assert_eq!((turn.answer.as_str(), turn.finished), ("", false), "{text}");
            assert_eq!(turn.reasoning.unwrap(), "the answer is 4");
        }
    }

    #[test]
    fn channels_are_thoughts_but_the_final_one() {
        let text = "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>";
        let turn = Turn::split(text, false);
        assert_eq!(
            (turn.reasoning.as_deref(), turn.answer.as_str()),
            (Some("2+2"), "4")
        );
    }
}
