//! `sinew bench`: what the benches need of this program.

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::sandbox_bench::unpooled;
use crate::{output, wire};
use sinew_bench::{BenchCommand, BenchError, Host, Real};
use sinew_env::Split;
use sinew_env::math::PromptConfig;
use sinew_model::load_model;
use std::path::Path;

/// Runs a bench.
pub(crate) fn run(command: &BenchCommand) -> Result<(), Failure> {
    let host = Host {
        device: || wire::device().map_err(refused),
        sandboxes: || unpooled(true).map_err(refused),
        model: load,
        print: output::print,
    };
    sinew_bench::run(command, &host).map_err(|error| match error {
        BenchError::Input(text) => Failure::Input(text),
        BenchError::System(text) => Failure::System(text),
    })
}

fn refused(failure: Failure) -> BenchError {
    match failure {
        Failure::Input(text) | Failure::Outside(text) => BenchError::Input(text),
        Failure::System(text) | Failure::Interrupt(text) | Failure::Program(_, text) => {
            BenchError::System(text)
        }
    }
}

/// The model `source`, as a recipe's `model` names it, with prompts of the `tool_math` environment.
fn load(source: &str) -> Result<Real, String> {
    let text = format!(
        "name = \"bench\"\nmodel = {source:?}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\" }}\n"
    );
    let recipe = Recipe::parse(Path::new("--model"), &text).map_err(|e| e.to_string())?;
    let failed = |e: Failure| e.text().to_owned();
    let files = wire::model_files(&recipe).map_err(failed)?;
    let files = files.ok_or("a model from scratch says nothing worth measuring")?;
    let params = load_model(&files).map_err(|e| e.to_string())?.params;
    let renderer = wire::renderer(&recipe).map_err(failed)?;
    let tasks = wire::taskset(&recipe).map_err(failed)?;
    let prompts = (0..Real::PROMPTS).map(|i| {
        let task = tasks.get(Split::Train, i).map_err(|e| e.to_string())?;
        let messages = PromptConfig::default().messages(&task.prompt);
        let prompt = renderer.render_prompt(&messages, &[]);
        prompt.map_err(|e| e.to_string())
    });
    let columns = params.config().vocab;
    Ok(Real {
        grammars: sinew_pipeline::grammars(&renderer, columns).map_err(|e| failed(e.into()))?,
        prompts: prompts.collect::<Result<_, _>>()?,
        params,
        renderer,
    })
}
