//! The live view of a run on a terminal.
//!
//! The view has a separate thread. It takes the events of the bus every 200 ms and draws below the cursor, in
//! all rows of the window but two, so that earlier output stays. Its queue is bounded: a terminal that hangs
//! loses events and never holds the run. It needs a terminal on standard error whose cursor can move, and the
//! foreground. Lines are printed instead if the terminal does not answer the view's requests.
//!
//! | panel | shows |
//! |---|---|
//! | bar | steps of the run, with the part of the step that is done |
//! | curve | mean reward and success of each step's training episodes |
//! | `longest in one phase` | live episodes, three or a third of the rows, with the time until they are cut |
//! | `now` | the numbers of [`Status`], and shares of time over all steps |
//!
//! `KV held` is the share of the engine's KV capacity that admitted episodes hold or are about to hold, and
//! `at most` the number of episodes that may hold it at a time.

use crate::log;
use crate::printer::{OutputForm, Printer, collected_line};
use crate::status::{Status, duration, told};
use crate::visible::visible;
use ratatui::backend::CrosstermBackend;
use ratatui::layout::{Constraint, Layout};
use ratatui::prelude::{Backend, Color, Frame, Line, Rect, Span, Style, Stylize, Widget};
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph};
use ratatui::{Terminal, TerminalOptions, Viewport};
use sinew_orchestrator::{
    Bus, CollectProgress, DIVERGENCE_ALARM, LONGEST, Recorder, RunEvent, StepRecord, TokenSummary,
    divergence,
};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Rows of the window that the view leaves to what was printed before.
const ABOVE: u16 = 2;
/// Fewest rows and columns of a window in which something can be read.
const LEAST: (u16, u16) = (8, 20);
/// Columns of the numbers, and the fewest in which a curve is useful.
const NUMBERS_WIDTH: u16 = 42;
/// Minimum columns of the curve; a narrower terminal shows only the numbers.
const CURVE_WIDTH: u16 = 30;
/// Time between two drawings.
const REFRESH: Duration = Duration::from_millis(200);

/// Events that wait for the next drawing.
const QUEUE: usize = 4096;

/// Draws a run on the terminal until dropped. Dropping it draws one last time and restores the terminal.
#[derive(Debug)]
pub struct LiveView {
    /// Ends the thread after one more drawing.
    stop: SyncSender<()>,
    /// `None` once it was stopped.
    thread: Option<JoinHandle<()>>,
}

impl LiveView {
    /// Whether standard error is a terminal that can show one.
    pub fn is_possible() -> bool {
        std::io::stderr().is_terminal() && can_move() && has_room() && in_foreground()
    }

    /// Draws the further events of the bus.
    pub fn start(status: Status, bus: &Bus) -> Self {
        let (stop, stopped) = sync_channel(1);
        let (events, lines) = (bus.watch(QUEUE), log::divert());
        let printer = Printer {
            out: OutputForm::Lines,
            steps: status.steps,
        };
        let thread = std::thread::spawn(move || {
            let mut over = false;
            let drawn = draw_until(status, &events, &stopped, &mut over, &lines);
            log::undivert();
            for text in lines.try_iter() {
                log::say(&text);
            }
            if let Err(e) = drawn {
                log::say(&format!(
                    "no live view, lines follow: the terminal does not answer ({e})"
                ));
                print_until(printer, &events, &stopped, over);
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Ends the view, so that what follows is printed below it.
    pub fn stop(&mut self) {
        let _ = self.stop.try_send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Shows the cursor again, for a process that ends without dropping the view.
    pub fn leave_terminal() {
        let _ = writeln!(std::io::stderr(), "\x1b[?25h");
    }
}

impl Drop for LiveView {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether the terminal understands more than lines.
fn can_move() -> bool {
    std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// Whether the terminal is large enough for the view. A terminal without a window reports a size of 0.
fn has_room() -> bool {
    rustix::termios::tcgetwinsize(std::io::stderr())
        .is_ok_and(|size| size.ws_row >= LEAST.0 && size.ws_col >= LEAST.1)
}

/// A process in the background of a shell is stopped when it asks its terminal for anything.
fn in_foreground() -> bool {
    rustix::termios::tcgetpgrp(std::io::stderr())
        .is_ok_and(|group| group == rustix::process::getpgrp())
}

/// A view in all rows of the window but [`ABOVE`].
///
/// # Errors
/// If the terminal does not tell its size, or where its cursor is.
fn terminal() -> std::io::Result<Terminal<CrosstermBackend<std::io::Stderr>>> {
    let backend = CrosstermBackend::new(std::io::stderr());
    let rows = backend.size()?.height.saturating_sub(ABOVE).max(1);
    let options = TerminalOptions {
        viewport: Viewport::Inline(rows),
    };
    Terminal::with_options(backend, options)
}

/// Draws until `stopped`, then leaves the cursor below the view. `over` is whether it was stopped.
///
/// # Errors
/// The request that the terminal refuses or leaves unanswered.
fn draw_until(
    mut status: Status,
    events: &Receiver<Arc<RunEvent>>,
    stopped: &Receiver<()>,
    over: &mut bool,
    lines: &Receiver<String>,
) -> std::io::Result<()> {
    let mut terminal = terminal()?;
    let mut rows = terminal.size()?.height;
    while !*over {
        *over = is_stopped(stopped);
        for event in events.try_iter() {
            status.apply(&event);
        }
        for text in lines.try_iter() {
            print_above(&mut terminal, &text)?;
        }
        let now = terminal.size()?.height;
        if now != rows {
            // A view keeps the rows that it began with.
            terminal.clear()?;
            (terminal, rows) = (self::terminal()?, now);
        }
        terminal.draw(|frame| draw(frame, &status))?;
    }
    // Later output belongs below the view, not over it.
    let area = terminal.get_frame().area();
    terminal.set_cursor_position((0, area.bottom().saturating_sub(1)))?;
    terminal.show_cursor()?;
    writeln!(std::io::stderr())
}

/// Waits for the time of the next look, and returns whether the view is to end.
fn is_stopped(stopped: &Receiver<()>) -> bool {
    !matches!(
        stopped.recv_timeout(REFRESH),
        Err(RecvTimeoutError::Timeout)
    )
}

/// Prints lines until `stopped`, for a view that cannot be drawn. Warnings and addresses are left out: the
/// printer of the run prints them in any case.
fn print_until(
    mut printer: Printer,
    events: &Receiver<Arc<RunEvent>>,
    stopped: &Receiver<()>,
    mut over: bool,
) {
    loop {
        for event in events.try_iter() {
            let printed = matches!(
                *event,
                RunEvent::Warning(_) | RunEvent::Serving { .. } | RunEvent::Controlled { .. }
            );
            if !printed {
                // Lines on standard error do not fail the run.
                let _ = printer.record(&event);
            }
        }
        if over {
            return;
        }
        over = is_stopped(stopped);
    }
}

/// Prints lines that belong to the history of the terminal, above the view.
fn print_above<B: Backend>(terminal: &mut Terminal<B>, text: &str) -> Result<(), B::Error> {
    let rows = rows_of(text, usize::from(terminal.size()?.width));
    terminal.insert_before(rows.len() as u16, |buffer| {
        let lines: Vec<Line<'_>> = rows.into_iter().map(Line::from).collect();
        Paragraph::new(lines).render(buffer.area, buffer);
    })
}

/// A text as rows of a terminal, without what would move its cursor or colour it; cut where it is long.
fn rows_of(text: &str, width: usize) -> Vec<String> {
    const MOST: usize = 20;
    let mut plain = String::new();
    let mut parts = text.split("\x1b[");
    plain.extend(parts.next());
    for part in parts {
        // Parameters, then the letter that ends the sequence.
        plain.extend(
            part.split_once(|c: char| c.is_ascii_alphabetic())
                .map(|p| p.1),
        );
    }
    let lines = plain.lines();
    let mut rows: Vec<String> = lines
        .flat_map(|line| wrapped(&visible(line), width.max(1)))
        .collect();
    let over = rows.len().saturating_sub(MOST);
    if over > 0 {
        rows.truncate(MOST - 1);
        rows.push(format!("... {} rows more", over + 1));
    }
    rows
}

/// Wraps a line into rows of `width` characters. It breaks at blanks if a row has room for the next word, so
/// that addresses and paths stay whole.
fn wrapped(line: &str, width: usize) -> Vec<String> {
    let mut rows = vec![Vec::<char>::new()];
    for word in line.split_inclusive(' ') {
        let word: Vec<char> = word.chars().collect();
        let length = word.iter().filter(|c| **c != ' ').count();
        let used = rows.last().map_or(0, Vec::len);
        if used > 0 && used + length > width {
            rows.push(Vec::new());
        }
        for c in word {
            match rows.last_mut() {
                Some(row) if row.len() < width => row.push(c),
                // The blank at which a row is broken.
                _ if c == ' ' => {}
                _ => rows.push(vec![c]),
            }
        }
    }
    let text = |row: Vec<char>| String::from_iter(row).trim_end().to_owned();
    rows.into_iter().map(text).collect()
}

/// Maximum number of environments whose success is shown.
const ENVIRONMENTS: usize = 4;

/// Draws one frame: a title, the progress of the run, an alarm if there is one, the curve and the numbers. A
/// narrow terminal has only the numbers.
fn draw(frame: &mut Frame<'_>, status: &Status) {
    let alarm = u16::from(status.alarm.is_some());
    let [head, bar, samples, warning, body] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(u16::from(!status.history.is_empty())),
        Constraint::Length(alarm),
        Constraint::Min(6),
    ])
    .areas(frame.area());
    if let Some(text) = &status.alarm {
        let first = visible(text.lines().next().unwrap_or_default());
        frame.render_widget(Paragraph::new(first.red().bold()), warning);
    }
    if let Some(last) = status.history.last() {
        let line = format!("samples of step {}: {}", last.step, last.samples.line());
        frame.render_widget(Paragraph::new(visible(&line)), samples);
    }
    let title = Line::from(vec![
        Span::from("sinew ").bold().fg(Color::Cyan),
        Span::from(status.title.clone()).bold(),
        Span::from(match status.steps {
            0 => String::new(),
            steps => format!("   step {}/{steps}", status.step),
        }),
        Span::from(format!(
            "   {}   {}{}",
            status.phase,
            duration(status.wall_s),
            status
                .left_s()
                .map_or_else(String::new, |s| format!(", about {} left", duration(s)))
        )),
    ]);
    frame.render_widget(Paragraph::new(title), head);
    let whole = status.steps.max(1) as f64;
    let part = if status.total > 0 {
        status.done as f64 / status.total as f64
    } else {
        0.0
    };
    let before = status.step.saturating_sub(1) as f64;
    let gauge = Gauge::default()
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(((before + part) / whole).clamp(0.0, 1.0))
        .label(status.progress());
    frame.render_widget(gauge, bar);
    let numbers = Constraint::Length(NUMBERS_WIDTH);
    if body.width < NUMBERS_WIDTH + CURVE_WIDTH {
        return draw_numbers(frame, body, status);
    }
    let [left, right] = Layout::horizontal([Constraint::Min(CURVE_WIDTH), numbers]).areas(body);
    let rows = match status.longest.len() {
        0 => 0,
        count => count.min(longest_in(body.height)) as u16 + 2,
    };
    let [curve, longest] =
        Layout::vertical([Constraint::Min(6), Constraint::Length(rows)]).areas(left);
    match &status.collected {
        Some(progress) => draw_collected(frame, curve, progress),
        None => draw_curve(frame, curve, status),
    }
    draw_longest(frame, longest, status);
    draw_numbers(frame, right, status);
}

/// Returns the number of live episodes that a view of `rows` rows lists; more in a taller window.
fn longest_in(rows: u16) -> usize {
    LONGEST.max(usize::from(rows) / 3)
}

/// Draws the progress of a collection, which has no steps.
fn draw_collected(frame: &mut Frame<'_>, area: Rect, progress: &CollectProgress) {
    let text = collected_line(progress);
    let lines: Vec<Line<'_>> = text.split("; ").map(|l| Line::from(l.to_owned())).collect();
    let block = Block::bordered().title(" collected ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// A part of a line.
fn line(part: &[(f64, f64)], color: Color) -> Dataset<'_> {
    Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(color))
        .data(part)
}

/// Reward and success of training episodes by step. Steps of which no episode has a reward are left out.
fn draw_curve(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    // Steps whose episodes all failed have no mean: the line has a gap there.
    let curve = |value: fn(&StepRecord) -> f64| -> Vec<Vec<(f64, f64)>> {
        let measured = |r: &StepRecord| r.rollout.scored() > 0;
        let parts = status.history.split(|r| !measured(r));
        let points = |part: &[StepRecord]| part.iter().map(|r| (r.step as f64, value(r))).collect();
        parts.filter(|p| !p.is_empty()).map(points).collect()
    };
    let (reward, success) = (curve(|r| r.rollout.reward), curve(|r| r.rollout.success));
    let rewards = || reward.iter().flatten().map(|p| p.1);
    let (bottom, top) = (rewards().fold(0.0, f64::min), rewards().fold(1.0, f64::max));
    let last = status.steps.max(2) as f64;
    // The legend is in the title, where it covers no point.
    let legend = Line::from(vec![
        Span::from(" training episodes: "),
        "reward".yellow(),
        Span::from(" "),
        "success".green(),
        Span::from(" "),
    ]);
    let rewards = reward.iter().map(|part| line(part, Color::Yellow));
    let successes = success.iter().map(|part| line(part, Color::Green));
    let chart = Chart::new(rewards.chain(successes).collect())
        .block(Block::bordered().title(legend))
        .legend_position(None)
        .x_axis(
            Axis::default()
                .bounds([1.0, last])
                .labels(["1".to_string(), format!("step {last}")]),
        )
        .y_axis(
            Axis::default()
                .bounds([bottom, top])
                .labels([format!("{bottom:.1}"), format!("{top:.1}")]),
        );
    frame.render_widget(chart, area);
}

/// The episodes to look at when nothing moves.
fn draw_longest(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let longest = status
        .longest
        .iter()
        .take(usize::from(area.height.saturating_sub(2)));
    let lines: Vec<Line<'_>> = longest.map(|l| told(l).into()).collect();
    let block = Block::bordered().title(" longest in one phase ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// The panel of numbers: episodes by what they do, KV capacity, tokens, and the shares of time over all
/// steps.
fn draw_numbers(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let (g, a) = (status.gauges, status.admission);
    let kv = match a.kv_tokens {
        0 => "-".to_owned(),
        total => format!("{:.0} %", 100.0 * a.held_tokens as f64 / total as f64),
    };
    let (generate, wait, train, rest) = status.split_s();
    let sum = (generate + wait + train + rest).max(1e-9);
    let percent = |x: f64| format!("{:>3.0} %", 100.0 * x / sum);
    let (all, left_out, most) = status.left_out();
    let mut lines = vec![
        Line::from(format!(
            "in flight {:>4}  starting {}",
            g.in_flight, g.booting
        )),
        Line::from(format!(
            "  in the model {:>4}  in tools {}",
            g.generating, g.in_tool
        )),
        Line::from(format!(
            "KV held {kv:>7}  waiting {}  at most {}",
            a.waiting_turns + a.new,
            a.limit
        )),
        Line::from(format!("episodes  {:>4}  failed {}", g.finished, g.failed)),
        Line::from(match all {
            0 => "left out     -".to_owned(),
            all => format!("left out  {left_out:>4} of {all}"),
        }),
        Line::from(format!("tokens/s  {:>4.0}", status.tokens_per_s)),
        Line::from(format!("generation      {}", percent(generate))),
        Line::from(format!("waiting (tools) {}", percent(wait))),
        Line::from(format!("training        {}", percent(train))),
        Line::from(format!("weights, disk   {}", percent(rest))),
    ];
    if let Some(most) = most {
        lines.insert(5, Line::from(format!("  most: {most}")));
    }
    let joins = &TokenSummary::of(&status.history).joins;
    if let Some(share) = divergence(joins) {
        let text = format!("histories rewritten {:.1} %", 100.0 * share);
        let alarm = share > DIVERGENCE_ALARM;
        lines.push(Line::from(if alarm { text.red() } else { text.into() }));
    }
    if let Some(before) = status.eval_before {
        lines.push(Line::from(format!(
            "held-out before {:>3.0} %",
            100.0 * before
        )));
    }
    if let Some(r) = status.history.last() {
        let envs = r.rollout.by_env.iter().take(ENVIRONMENTS);
        lines.extend(envs.map(|(name, own)| {
            Line::from(format!("{name:<14.14}  {:>3.0} %", 100.0 * own.success))
        }));
        lines.push(Line::from(match r.updates_applied {
            0 => format!("step {} trained nothing", r.step),
            _ => format!(
                "loss {:+.4} grad {:.2} entropy {}",
                r.loss,
                r.grad_norm,
                r.entropy_text()
            ),
        }));
    }
    let block = Block::bordered().title(" now ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::backend::TestBackend;
    use ratatui::prelude::Backend;
    use sinew_rollout::{AdmissionReading, LiveEpisode};

    #[test]
    fn lines_above_the_view_are_cut_to_rows_without_codes() {
        let rows = rows_of("\x1b[31mERROR\x1b[0m abcdefgh\rij\nsecond", 10);
        assert!(rows.iter().all(|r| !r.contains(['\x1b', '\r'])), "{rows:?}");
        assert_eq!(rows[..2], ["ERROR", "abcdefgh\\u"].map(str::to_owned));
        assert_eq!(rows.last().unwrap(), "second");
        let rows = rows_of(&"x".repeat(10_000), 10);
        assert_eq!((rows.len(), rows[19].as_str()), (20, "... 981 rows more"));
        let link = "http://127.0.0.1:4321/x";
        let rows = rows_of(&format!("serving agents at {link} now"), 26);
        assert_eq!(rows, ["serving agents at", link, "now"].map(str::to_owned));
        let mut terminal = Terminal::with_options(
            TestBackend::new(20, 6),
            TerminalOptions {
                viewport: Viewport::Inline(3),
            },
        )
        .unwrap();
        terminal
            .draw(|f| f.render_widget(Paragraph::new("VIEW"), f.area()))
            .unwrap();
        print_above(&mut terminal, "a warning").unwrap();
        terminal
            .draw(|f| f.render_widget(Paragraph::new("VIEW"), f.area()))
            .unwrap();
        let shown = terminal.backend().to_string();
        let (above, view) = shown.split_once("VIEW").unwrap();
        assert!(above.contains("a warning"), "{shown}");
        assert!(!view.contains("warning"), "{shown}");
    }

    fn screen(status: &Status, width: u16) -> String {
        screen_of(status, width, 19)
    }

    fn screen_of(status: &Status, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, status)).unwrap();
        let size = terminal.backend().size().unwrap();
        let buffer = terminal.backend().buffer().clone();
        (0..size.height)
            .map(|y| {
                let row = (0..size.width).map(|x| buffer[(x, y)].symbol());
                row.collect::<String>() + "\n"
            })
            .collect()
    }

    #[test]
    fn the_view_shows_progress_curve_and_where_time_goes() {
        let mut status = Status {
            title: "quickstart".into(),
            phase: "rolling out".into(),
            step: 3,
            steps: 10,
            done: 5,
            total: 64,
            eval_before: Some(0.2),
            longest: vec![LiveEpisode {
                episode: sinew_types::EpisodeId::new("s3-t7-2"),
                phase: sinew_rollout::Phase::Tool,
                phase_s: 45.0,
                left_s: Some(75.0),
            }],
            admission: AdmissionReading {
                held_tokens: 300,
                kv_tokens: 1000,
                waiting_turns: 2,
                new: 5,
                limit: 48,
                ..AdmissionReading::default()
            },
            ..Status::default()
        };
        for step in 1..=2 {
            let mut record = StepRecord {
                step,
                rollout_s: 10.0,
                engine_busy_s: 8.0,
                train_s: 10.0,
                ..StepRecord::default()
            };
            record.rollout.reward = 0.3 * step as f64;
            record.rollout.episodes = 64;
            record.samples.scored = 60;
            record.dropped = [("equal rewards in the group".into(), 24)].into();
            record.joins = [("extend".into(), 9), ("fork".into(), 1)].into();
            status.history.push(record);
        }
        let text = screen(&status, 100);
        for needle in [
            "quickstart",
            "step 3/10",
            "rolling out",
            "5 of 64",
            "training         50 %",
            "generation       40 %",
            "before  20 %",
            "KV held    30 %  waiting 7  at most 48",
            "about 2m40s left",
            "histories rewritten 10.0 %",
            "longest in one phase",
            "tool  45s  s3-t7-2, cut in 1m15s",
            "training episodes: reward success",
            "left out    48 of 128",
            "most: equal rewards in the group",
            "samples of step 2: scored 60, unscored 0, equal rewards 0, truncated 0, too old 0",
        ] {
            assert!(text.contains(needle), "{needle} not in\n{text}");
        }
    }

    #[test]
    fn a_narrow_terminal_has_the_numbers_without_the_curve() {
        let text = screen(&Status::default(), 44);
        assert!(text.contains("training          0 %"), "{text}");
        assert!(!text.contains("training episodes"), "{text}");
    }

    #[test]
    fn a_warning_and_the_progress_of_an_update_are_shown() {
        let status = Status {
            alarm: Some("5 of 8 episodes of step 2 failed: engine\n  hint".into()),
            done: 3,
            total: 12,
            update: (1, 2),
            ..Status::default()
        };
        let text = screen(&status, 100);
        for needle in [
            "5 of 8 episodes of step 2 failed",
            "micro-batch 3 of 12, update 1 of 2",
        ] {
            assert!(text.contains(needle), "{needle} not in\n{text}");
        }
    }

    #[test]
    fn a_high_window_is_used() {
        let live = |n: u32| LiveEpisode {
            episode: sinew_types::EpisodeId::new(format!("live-{n}.")),
            phase: sinew_rollout::Phase::Tool,
            phase_s: 45.0,
            left_s: None,
        };
        let status = Status {
            longest: (0..40).map(live).collect(),
            ..Status::default()
        };
        let listed = |height| screen_of(&status, 100, height).matches("live-").count();
        assert_eq!(listed(19), 5);
        assert_eq!(listed(49), 15);
        let filled = |text: String| text.lines().rev().take(3).any(|l| !l.trim().is_empty());
        assert!(
            filled(screen_of(&status, 100, 49)),
            "the last rows are used"
        );
    }

    #[test]
    fn a_view_that_cannot_be_drawn_prints_until_it_is_stopped() {
        let bus = Bus::default();
        let events = bus.watch(QUEUE);
        let (stop, stopped) = sync_channel(1);
        let printer = Printer {
            out: OutputForm::Lines,
            steps: 3,
        };
        let lines = log::divert();
        bus.emit(RunEvent::Described("model of 2 layers".into()))
            .unwrap();
        bus.emit(RunEvent::Warning("said by the printer".into()))
            .unwrap();
        stop.send(()).unwrap();
        print_until(printer, &events, &stopped, false);
        log::undivert();
        let printed: Vec<String> = lines.try_iter().collect();
        assert_eq!(printed, ["model of 2 layers"]);
        // Lines from before the view's last drawing are printed, too.
        bus.emit(RunEvent::Described("more".into())).unwrap();
        let lines = log::divert();
        print_until(printer, &events, &stopped, true);
        log::undivert();
        assert_eq!(lines.try_iter().collect::<Vec<_>>(), ["more"]);
    }

    #[test]
    fn a_narrow_terminal_does_not_panic() {
        for width in [1, 5, 20, 40] {
            screen(&Status::default(), width);
        }
    }
}
