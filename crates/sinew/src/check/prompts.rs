//! Whether what the environment asks, and a right turn after it, fit into the limits of an episode.

use sinew_env::EnvFactory;
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_types::{Message, Role, Task, ToolSpec};
use sinew_wire::Failure;
use std::time::Instant;

/// Maximum number of tasks of each split whose prompts are rendered.
const TASKS: usize = 32;
/// Maximum number of turns of a solution that are measured.
const TURNS: usize = 64;

/// Tokens of one task, as the policy's tokenizer and template give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    /// All messages before the first turn, with the opening of that turn.
    prompt: usize,
    /// The shortest turn of its solution, with the token that ends it.
    turn: usize,
}

/// Renders prompts with the model's tokenizer and template. Refused is a recipe in which most tasks have no
/// room for the shortest turn of their solution: nothing could be learned.
pub(super) fn prompts(recipe: &RunPlan, world: &sinew_wire::World) -> Result<String, Failure> {
    let sinew_wire::World { taskset, envs, .. } = world;
    let renderer = sinew_wire::renderer(&recipe.model, &recipe.env)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::system)?;
    let (mut sizes, begun) = (Vec::new(), Instant::now());
    for task in super::some_tasks(taskset.as_ref(), TASKS)? {
        let asked = runtime.block_on(ask(envs.as_ref(), &task))?;
        sizes.push(size(envs.as_ref(), renderer.as_ref(), &task, asked)?);
        if begun.elapsed() > super::PATIENCE {
            break;
        }
    }
    let limits = &recipe.rollout;
    judge(
        &sizes,
        limits.max_context_tokens as usize,
        limits.max_turn_tokens as usize,
    )
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

/// Renders the prompt of a task and each turn of its solution. A task without a solution counts as one
/// with a turn of one token.
fn size(
    envs: &dyn EnvFactory,
    renderer: &dyn Renderer,
    task: &Task,
    (messages, tools): (Vec<Message>, Vec<ToolSpec>),
) -> Result<Size, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("task {}: {e}", task.id));
    let prompt = renderer
        .render_prompt(&messages, &tools)
        .map_err(|e| failed(&e))?;
    let mut turn = usize::MAX;
    for k in 0..TURNS {
        let Some(said) = envs.gold(task, k).map_err(|e| failed(&e))? else {
            break;
        };
        let mut message = Message::new(Role::Assistant, said.text);
        // A text has the calls in it already.
        if message.content.is_empty() {
            message.tool_calls = said.tool_calls;
        }
        let said = message;
        let all = [&messages[..], &[said]].concat();
        let ids = renderer.render_turn(&all, &tools).map_err(|e| failed(&e))?;
        turn = turn.min(ids.len());
    }
    Ok(Size {
        prompt: prompt.len(),
        turn: if turn == usize::MAX { 1 } else { turn },
    })
}

/// The sizes in words, or the limit that is too small for more than half of the tasks.
fn judge(sizes: &[Size], context: usize, turn: usize) -> Result<String, Failure> {
    let shortest = sizes.iter().map(|s| s.prompt).min().unwrap_or(0);
    let longest = sizes.iter().map(|s| s.prompt).max().unwrap_or(0);
    let room = sizes.iter().map(|s| s.prompt + s.turn).max().unwrap_or(0);
    let turns = sizes.iter().map(|s| s.turn).max().unwrap_or(0);
    let prompts = format!(
        "prompts of {} tasks have {shortest} to {longest} tokens",
        sizes.len()
    );
    let short = sizes.iter().filter(|s| s.turn > turn).count();
    if 2 * short > sizes.len() {
        return Err(Failure::input(format!(
            "rollout.max_turn_tokens = {turn}: the shortest turns of the solutions have up to {turns} tokens with their \
             end: {short} of {} tasks cannot be solved; allowed: {turns} or more",
            sizes.len()
        )));
    }
    let full = sizes.iter().filter(|s| s.prompt + s.turn > context).count();
    if 2 * full > sizes.len() {
        return Err(Failure::input(format!(
            "rollout.max_context_tokens = {context}: {prompts}, and {full} of them have no room for a turn of their \
             solution after it; allowed: {room} or more",
        )));
    }
    let left_out = match full.max(short) {
        0 => "all have room for a turn of their solution".to_owned(),
        n => format!(
            "{n} of them have no room for a turn of their solution, the limits are too small"
        ),
    };
    Ok(format!("{prompts}; {left_out}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_most_tasks_exceed_are_refused_with_what_they_need() {
        let sizes = [(190, 5), (192, 6), (150, 4)].map(|(prompt, turn)| Size { prompt, turn });
        let text = |context, turn| match judge(&sizes, context, turn) {
            Ok(text) => text,
            Err(e) => format!("refused: {}", e.text()),
        };
        assert!(text(768, 48).ends_with("all have room for a turn of their solution"));
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
}
