//! Programs that work in the world of their episode, such as its container.
//!
//! The environment starts before the program, gives it the place and the only way to its model, and judges
//! what it left there. An observation of the environment is the program's next task, in the same rollout.
//! Rewards of the recipe read the answers of the program, and not the messages of its rollout.

use super::{
    OF_THE_TOOL, PROGRAM_FAILED, ProgramHarness, Refusal, agent_end, bad_exit, environment, fail,
    failure, harness, last_line, within,
};
use crate::action;
use crate::driver::close;
use crate::episode::EpisodeSpec;
use crate::gauges::Phase;
use crate::harness::forward::PortForward;
use crate::harness::model_server::ModelAccess;
use crate::harness::sandboxed::ProgramEnd;
use crate::parts::{EpisodeOptions, EpisodeParts};
use sinew_env::{CallNotation, Env, HostedProgram};
use sinew_sandbox::Ending;
use sinew_types::{EpisodeEnd, Limit, Outcome, Task, Trace};
use tokio::time::Instant;

/// End of the programs of an episode.
struct Acted {
    /// End of the last one.
    ended: ProgramEnd,
    /// Its answer.
    answer: String,
    /// Outcome, if the environment ended the episode.
    outcome: Option<Outcome>,
}

impl ProgramHarness {
    /// Runs one episode in a new environment, which is closed in any case.
    pub(super) async fn hosted(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<Trace, Refusal> {
        let env = parts.envs.create(&spec.task);
        let mut env = env.map_err(|e| environment(&e))?;
        let played = self.play_in(parts, options, spec, env.as_mut()).await;
        close(env, spec.episode.clone()).await;
        played
    }

    /// Starts the environment, runs the program in it, finishes the rollout, and asks for the score.
    async fn play_in(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
        env: &mut dyn Env,
    ) -> Result<Trace, Refusal> {
        let started = {
            let deadline = Some(Instant::now() + options.boot_timeout);
            let _in_phase = parts.gauges.enter(&spec.episode, Phase::Boot, deadline);
            within(options.boot_timeout, "start", env.reset()).await?
        };
        let access = self.server.open(parts, options, spec);
        let access = access.map_err(|e| harness(&e))?;
        let acted = {
            let deadline = Some(Instant::now() + options.timeout);
            let _in_phase = parts.gauges.enter(&spec.episode, Phase::Tool, deadline);
            self.act_in(options, &spec.task, &access, &started.calls, env)
                .await
        };
        let cut = matches!(&acted, Ok(a) if a.ended.ending == Ending::Timeout);
        let end = cut.then_some(EpisodeEnd::Truncated {
            limit: Limit::WallTime,
        });
        let trace = self.server.finish(&spec.episode, end).await;
        let mut trace = trace.map_err(|e| harness(&e))?;
        let Acted {
            ended,
            answer,
            outcome,
        } = acted?;
        let told = agent_end(&self.programs, &ended, &mut trace);
        if let Some(why) = failure(&ended, told.as_ref(), &trace) {
            fail(&mut trace, harness(&why));
            return Ok(trace);
        }
        let outcome = match outcome {
            Some(outcome) => Ok(outcome),
            None => {
                let deadline = Some(Instant::now() + options.score_timeout);
                let _in_phase = parts.gauges.enter(&spec.episode, Phase::Score, deadline);
                within(options.score_timeout, "score", env.score()).await
            }
        };
        match outcome {
            Ok(mut outcome) => {
                let failed = f64::from(u8::from(bad_exit(&ended).is_some()));
                let metrics = &mut outcome.metrics;
                metrics.retain(|name, _| !OF_THE_TOOL.contains(&name.as_str()));
                metrics.extend(std::mem::take(&mut trace.outcome.metrics));
                metrics.insert(PROGRAM_FAILED.to_owned(), failed);
                outcome.answer = Some(answer);
                trace.outcome = outcome;
            }
            Err(refusal) => fail(&mut trace, refusal),
        }
        Ok(trace)
    }

    /// Runs the program for the task, and again for each further one that the environment gives, until the
    /// environment has a score, the program fails, or its time is over.
    async fn act_in(
        &self,
        options: &EpisodeOptions,
        task: &Task,
        access: &ModelAccess,
        calls: &CallNotation,
        env: &mut dyn Env,
    ) -> Result<Acted, Refusal> {
        let model = self.programs.model();
        let place = env.host();
        let place = place.ok_or_else(|| harness(&"the environment has no place"))?;
        let servers = place.mcp_servers();
        let inside = place.listen_inside(model.port()).await;
        let inside = inside.map_err(|e| environment(&e))?;
        let _forward = PortForward::start(inside, model)
            .map_err(|e| harness(&format!("the connection to the model: {e}")))?;
        let until = Instant::now() + options.timeout;
        let mut task = task.clone();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let (argv, variables) = self.programs.hosted(access, &task, &servers);
            let program = HostedProgram {
                argv,
                env: variables,
                deadline: self.programs.timeout().min(left),
            };
            let place = env.host().ok_or_else(|| harness(&"the place is gone"))?;
            let result = place.run(program).await;
            let ended = ProgramEnd::of(result.map_err(|e| environment(&e))?);
            let told = self.programs.agent().map(|agent| agent.end(&ended.stdout));
            let said = match told {
                Some(told) => told.answer,
                None => last_line(&ended.stdout).map(str::to_owned),
            };
            let answer = said.unwrap_or_default();
            let acted = |outcome| Acted {
                ended: ended.clone(),
                answer: answer.clone(),
                outcome,
            };
            if ended.ending == Ending::Timeout || bad_exit(&ended).is_some() {
                return Ok(acted(None));
            }
            let turn = env.step(action::of_answer(calls, &answer));
            let step = within(options.score_timeout, "judge the answer", turn).await?;
            match (step.outcome, step.observation) {
                (None, Some(next)) => task.prompt = next.content.text().into_owned(),
                (outcome, _) => return Ok(acted(outcome)),
            }
        }
    }
}
