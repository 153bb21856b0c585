//! Checks that the environment's messages, and a right turn after them, fit into the limits of an episode.

use crate::runtime;
use sinew_assembly::Failure;
use sinew_env::EnvFactory;
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_types::{Message, Role, Task, ToolSpec};
use std::time::Instant;

/// Maximum number of tasks of each split whose prompts are rendered.
const TASKS: usize = 32;
/// Maximum number of turns of a solution that are measured.
const TURNS: usize = 64;

/// Tokens of one task, as the policy's tokenizer and template give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// All messages before the first turn, with the opening of that turn.
    pub(crate) prompt: usize,
    /// The shortest turn of its solution, with the token that ends it; `None` where no solution is known.
    turn: Option<usize>,
    /// Tokens of the longest text in a column that holds answers, which may include worked solutions.
    pub(crate) worked: usize,
}

/// Renders prompts with the model's tokenizer and template. Refused is a recipe in which most tasks have no
/// room for the shortest turn of their solution: nothing could be learned.
pub(super) fn prompts(recipe: &RunPlan, world: &sinew_assembly::World) -> Result<String, Failure> {
    let renderer = sinew_assembly::renderer(&recipe.model, &recipe.env)?;
    let limits = &recipe.rollout;
    judge(
        &measure(renderer.as_ref(), world)?,
        limits.max_context_tokens as usize,
        limits.max_turn_tokens as usize,
    )
}

/// Sizes of some tasks of each split, by the model's tokenizer and template.
///
/// # Errors
/// If a task cannot be asked or rendered.
pub(crate) fn measure(
    renderer: &dyn Renderer,
    world: &sinew_assembly::World,
) -> Result<Vec<Size>, Failure> {
    let sinew_assembly::World { taskset, envs, .. } = world;
    let runtime = runtime::on_this_thread()?;
    let (mut sizes, begun) = (Vec::new(), Instant::now());
    for task in super::some_tasks(taskset.as_ref(), TASKS)? {
        let (messages, tools) = runtime.block_on(ask(envs.as_ref(), &task))?;
        sizes.push(size(envs.as_ref(), renderer, &task, messages, tools)?);
        if begun.elapsed() > super::PATIENCE {
            break;
        }
    }
    Ok(sizes)
}

/// Messages and tools that an episode of `task` begins with. The environment is closed again: no turn is
/// played.
pub(crate) async fn ask(
    envs: &dyn EnvFactory,
    task: &Task,
) -> Result<(Vec<Message>, Vec<ToolSpec>), Failure> {
    let failed = |e| Failure::input(format!("task {}: {e}", task.id));
    let mut env = envs.create(task).map_err(failed)?;
    let reset = env.reset().await;
    env.close().await.map_err(failed)?;
    let reset = reset.map_err(failed)?;
    Ok((reset.messages, reset.tools))
}

/// Measures a task in tokens: its rendered prompt, the shortest turn of its reference solution, and the
/// longest data column that holds an answer.
fn size(
    envs: &dyn EnvFactory,
    renderer: &dyn Renderer,
    task: &Task,
    messages: Vec<Message>,
    tools: Vec<ToolSpec>,
) -> Result<Size, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("task {}: {e}", task.id));
    let prompt = renderer
        .render_prompt(&messages, &tools)
        .map_err(|e| failed(&e))?;
    let tokens = |message: Message| {
        let all = [&messages[..], &[message]].concat();
        let ids = renderer.render_turn(&all, &tools).map_err(|e| failed(&e))?;
        Ok::<usize, Failure>(ids.len())
    };
    let mut turn = None;
    for k in 0..TURNS {
        let Some(said) = envs.gold(task, k).map_err(|e| failed(&e))? else {
            break;
        };
        let mut message = Message::new(Role::Assistant, said.text);
        // A text has the calls in it already.
        if message.content.is_empty() {
            message.tool_calls = said.tool_calls;
        }
        let needed = tokens(message)?;
        turn = Some(turn.map_or(needed, |turn: usize| turn.min(needed)));
    }
    let mut worked = 0;
    let columns = task.data.as_object().into_iter();
    for text in columns.flat_map(sinew_runs::answers_of) {
        worked = worked.max(tokens(Message::new(Role::Assistant, text.to_owned()))?);
    }
    Ok(Size {
        prompt: prompt.len(),
        turn,
        worked,
    })
}

/// The sizes in words, or the limit that is too small for more than half of the tasks.
fn judge(sizes: &[Size], context: usize, turn: usize) -> Result<String, Failure> {
    let shortest = sizes.iter().map(|s| s.prompt).min().unwrap_or(0);
    let longest = sizes.iter().map(|s| s.prompt).max().unwrap_or(0);
    // A turn has a token at least.
    let whole = |s: &Size| s.prompt + s.turn.unwrap_or(1);
    let room = sizes.iter().map(whole).max().unwrap_or(0);
    let turns = sizes.iter().filter_map(|s| s.turn).max();
    let prompts = format!(
        "prompts of {} tasks have {shortest} to {longest} tokens",
        sizes.len()
    );
    let short = sizes
        .iter()
        .filter(|s| s.turn.is_some_and(|t| t > turn))
        .count();
    if 2 * short > sizes.len() {
        let turns = turns.unwrap_or(0);
        return Err(Failure::input(format!(
            "rollout.max_turn_tokens = {turn}: the shortest turns of the solutions have up to {turns} tokens with their \
             end: {short} of {} tasks cannot be solved; allowed: {turns} or more",
            sizes.len()
        )));
    }
    let full = sizes.iter().filter(|s| whole(s) > context).count();
    if 2 * full > sizes.len() {
        return Err(Failure::input(format!(
            "rollout.max_context_tokens = {context}: {prompts}, and {full} of them have no room for a turn of their \
             solution after it; allowed: {room} or more",
        )));
    }
    let left_out = match (full.max(short), turns) {
        (0, Some(turns)) => format!(
            "all have room for the shortest turn of their solution, of up to {turns} tokens with its end"
        ),
        (0, None) => {
            format!("no solution is known to compare with rollout.max_turn_tokens = {turn}")
        }
        (n, _) => format!(
            "{n} of them have no room for a turn of their solution, the limits are too small"
        ),
    };
    Ok(format!("{prompts}; {left_out}{}", cut(sizes, turn)))
}

/// A warning where most answers that the rows show are longer than a turn may be.
fn cut(sizes: &[Size], turn: usize) -> String {
    let longer = sizes.iter().filter(|s| s.worked > turn).count();
    if 2 * longer <= sizes.len() {
        return String::new();
    }
    let longest = sizes.iter().map(|s| s.worked).max().unwrap_or(0);
    format!(
        "; warning: the answers in the rows have up to {longest} tokens, {longer} of {} more than \
         rollout.max_turn_tokens = {turn}: an answer as long as theirs is cut before its end",
        sizes.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_most_tasks_exceed_are_refused_with_what_they_need() {
        let sizes = [(190, 5), (192, 6), (150, 4)].map(|(prompt, turn)| Size {
            prompt,
            turn: Some(turn),
            worked: 0,
        });
        let text = |context, turn| match judge(&sizes, context, turn) {
            Ok(text) => text,
            Err(e) => format!("refused: {}", e.text()),
        };
        assert!(text(768, 48).ends_with("solution, of up to 6 tokens with its end"));
        let e = text(100, 48);
        assert!(
            e.contains("refused: rollout.max_context_tokens = 100"),
            "{e}"
        );
        assert!(
            e.contains("150 to 192 tokens") && e.contains("allowed: 198 or more"),
            "{e}"
        );
        let e = text(768, 1);
        assert!(
            e.contains("rollout.max_turn_tokens = 1") && e.contains("allowed: 6 or more"),
            "{e}"
        );
        let few = text(195, 48);
        assert!(few.contains("1 of them have no room"), "{few}");
    }
    #[test]
    fn answers_longer_than_a_turn_are_named_and_an_unknown_solution_is_not_said_to_fit() {
        let size = |worked| Size {
            prompt: 90,
            turn: None,
            worked,
        };
        let text = judge(&[size(310), size(120), size(40)], 1024, 48).unwrap();
        assert!(text.contains("no solution is known"), "{text}");
        assert!(
            text.contains("up to 310 tokens, 2 of 3 more than rollout.max_turn_tokens = 48"),
            "{text}"
        );
        let text = judge(&[size(310), size(20), size(40)], 1024, 48).unwrap();
        assert!(!text.contains("warning"), "{text}");
    }
}
