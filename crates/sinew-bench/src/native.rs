//! Steps of a native environment through its port, compared with the same one in Python under Gymnasium's
//! vector API.

use super::peers::Peers;
use super::row::{Better, Row, Summary};
use crate::BenchError;
use sinew_env::tiny::{TinyFactory, TinyTaskset};
use sinew_env::{Action, Env, EnvFactory, Split, Taskset};
use std::time::Instant;

/// Measured steps of a repetition, and repetitions.
const STEPS: usize = 200_000;
const REPETITIONS: usize = 5;
/// Least ratio hoped for.
const TARGET: f64 = 20.0;

/// A row for so many environments at once, which take turns.
pub(super) async fn steps(at_once: usize, peers: &Peers) -> Result<Row, BenchError> {
    let tasks = TinyTaskset::new(0);
    let mut values = Vec::new();
    for repetition in 0..=REPETITIONS {
        let started = Instant::now();
        let done = walk(&tasks, at_once).await?;
        // The first one warms up.
        if repetition > 0 {
            values.push(done as f64 / started.elapsed().as_secs_f64());
        }
    }
    let summary = Summary::of(values, Better::More).unwrap_or_default();
    let row = Row::new(format!("native steps, {at_once} at once"), "1/s", summary);
    let script = "gymnasium_corridor.py";
    Ok(match peers.run(script, &[&at_once.to_string()]) {
        Ok(peer) => row
            .against(&peer.version, peer.summary.median, Better::More)
            .target(TARGET),
        Err(why) => row.without_peer("Gymnasium", why),
    })
}

/// Environments walk to their goals; each that ends is replaced by the next task. Returns the steps done.
async fn walk(tasks: &TinyTaskset, at_once: usize) -> Result<usize, BenchError> {
    let length = tasks.len(Split::Train);
    let mut next = 0;
    let mut open = async || {
        let task = tasks.get(Split::Train, next % length);
        let task = task.map_err(BenchError::system)?;
        next += 1;
        let action = TinyFactory.gold(&task, 0).map_err(BenchError::system)?;
        let mut env = TinyFactory.create(&task).map_err(BenchError::system)?;
        env.reset().await.map_err(BenchError::system)?;
        Ok::<(Box<dyn Env>, Action), BenchError>((env, action.unwrap_or(Action::say("r"))))
    };
    let mut worlds = Vec::with_capacity(at_once);
    for _ in 0..at_once {
        worlds.push(open().await?);
    }
    let mut done = 0;
    while done < STEPS {
        for world in &mut worlds {
            let stepped = world.0.step(world.1.clone()).await;
            done += 1;
            if stepped.map_err(BenchError::system)?.done {
                world.0.close().await.map_err(BenchError::system)?;
                *world = open().await?;
            }
        }
    }
    Ok(done)
}
