//! The models beside the policy: what a KL term compares with, and who teaches.

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::wire;
use sinew_algo::Needs;
use sinew_model::{
    ModelConfig, ModelFiles, Params, ResolveError, load_config, load_model, resolve_model,
};
use sinew_tensor::Device;
use sinew_train::{ModelPolicy, TrainError, score_rows, score_top};
use sinew_types::{TokenLogprob, TrainRow};
use std::path::{Path, PathBuf};

/// Where reference log-probabilities come from.
enum Reference {
    /// The weights under the adapters, which training leaves alone.
    Base,
    Model(Box<ModelPolicy>),
}

/// Frozen models that score what the policy sampled.
pub(crate) struct Judges {
    reference: Option<Reference>,
    teacher: Option<Box<ModelPolicy>>,
    max_rows: usize,
}

fn failed(e: impl std::fmt::Display) -> Failure {
    Failure::system(format!("trainer: {e}"))
}

/// A model that is not there: something to get first, or a name that cannot be one.
pub(crate) fn unresolved(key: &str, e: ResolveError) -> Failure {
    let text = format!("{key}: {e}");
    match e {
        ResolveError::NoPath { .. }
        | ResolveError::Missing { .. }
        | ResolveError::NoPackage { .. }
        | ResolveError::Offline { .. }
        | ResolveError::Hub { .. } => Failure::outside(text),
        _ => Failure::input(text),
    }
}

/// Files of a reference or teacher: of a model, or the last checkpoint of a run's folder.
pub(crate) fn files(key: &str, source: &str) -> Result<ModelFiles, Failure> {
    let run = Path::new(source).join("checkpoints");
    let folder = match std::fs::read_to_string(run.join("LATEST")) {
        Err(_) => {
            return resolve_model(source, &wire::resolve_env())
                .map_err(|e| unresolved(&format!("{key} = {source:?}"), e));
        }
        Ok(name) => run.join(name.trim()),
    };
    if !folder.join("model.safetensors").is_file() {
        return Err(Failure::input(format!(
            "{key} = {source:?}: {} holds no whole model; a run with adapters alone cannot be one",
            folder.display()
        )));
    }
    Ok(ModelFiles::Dir(folder))
}

/// The configuration of a reference or teacher, which must speak the policy's tokens.
pub(crate) fn check(key: &str, source: &str, vocab: usize) -> Result<ModelConfig, Failure> {
    let files = files(key, source)?;
    let config = load_config(&files).map_err(|e| Failure::input(format!("{key}: {e}")))?;
    if config.vocab == vocab {
        return Ok(config);
    }
    Err(Failure::input(format!(
        "{key} = {source:?}: it has {} tokens, the policy {vocab}; both must have one tokenizer",
        config.vocab
    )))
}

fn load(key: &str, source: &str, vocab: usize) -> Result<Params, Failure> {
    check(key, source, vocab)?;
    let loaded = load_model(&files(key, source)?);
    Ok(loaded
        .map_err(|e| Failure::input(format!("{key}: {e}")))?
        .params)
}

impl Judges {
    /// Loads what `needs` asks for; `initial` are the weights that the run begins with.
    pub(crate) fn new(
        recipe: &Recipe,
        needs: Needs,
        device: &Device,
        initial: &Params,
    ) -> Result<Self, Failure> {
        let context = recipe.rollout.max_context_tokens as usize;
        let vocab = initial.config().vocab;
        let frozen = |params: Params| {
            let model = ModelPolicy::frozen(params, context, device.clone());
            model.map(Box::new).map_err(failed)
        };
        let reference = match &recipe.reference {
            _ if !needs.reference() => None,
            Some(named) => {
                let params = load("reference.model", &named.model, vocab)?;
                Some(Reference::Model(frozen(params)?))
            }
            None if recipe.train.lora.is_some() => Some(Reference::Base),
            None => Some(Reference::Model(frozen(initial.clone())?)),
        };
        let teacher = match &recipe.teacher {
            Some(named) => Some(frozen(load("teacher.model", &named.model, vocab)?)?),
            None => None,
        };
        Ok(Self {
            reference,
            teacher,
            max_rows: recipe.train.micro_batch_tokens,
        })
    }

    /// Reference log-probabilities of rows.
    pub(crate) fn reference(
        &mut self,
        policy: &mut ModelPolicy,
        rows: &[TrainRow],
    ) -> Result<Vec<Vec<f32>>, Failure> {
        match &mut self.reference {
            Some(Reference::Model(model)) => {
                score_rows(model.as_mut(), rows, self.max_rows).map_err(failed)
            }
            Some(Reference::Base) => {
                let mut scored = rows.to_vec();
                policy
                    .fill_reference_from_base(&mut scored, self.max_rows)
                    .map_err(failed)?;
                Ok(scored.into_iter().filter_map(|r| r.ref_logprobs).collect())
            }
            None => Err(Failure::system("no reference model was loaded")),
        }
    }

    /// The teacher's log-probabilities of rows.
    pub(crate) fn teacher(&mut self, rows: &[TrainRow]) -> Result<Vec<Vec<f32>>, Failure> {
        let max_rows = self.max_rows;
        self.ask_teacher(|teacher| score_rows(teacher, rows, max_rows))
    }

    /// The teacher's `k` most likely tokens in the place of each trained one.
    pub(crate) fn teacher_top(
        &mut self,
        rows: &[TrainRow],
        k: usize,
    ) -> Result<Vec<Vec<Vec<TokenLogprob>>>, Failure> {
        let max_rows = self.max_rows;
        self.ask_teacher(|teacher| score_top(teacher, rows, max_rows, k))
    }

    fn ask_teacher<T>(
        &mut self,
        ask: impl FnOnce(&mut ModelPolicy) -> Result<T, TrainError>,
    ) -> Result<T, Failure> {
        let teacher = self.teacher.as_mut();
        let teacher = teacher.ok_or_else(|| Failure::system("no teacher was loaded"))?;
        ask(teacher).map_err(failed)
    }
}

/// Where the models beside the policy lie, for messages: key and source.
pub(crate) fn named(recipe: &Recipe) -> Vec<(&'static str, String)> {
    let mut named = Vec::new();
    named.extend(
        recipe
            .reference
            .iter()
            .map(|r| ("reference.model", r.model.clone())),
    );
    named.extend(
        recipe
            .teacher
            .iter()
            .map(|t| ("teacher.model", t.model.clone())),
    );
    named
}

/// A folder named by a recipe, if it is one.
pub(crate) fn run_folder(source: &str) -> Option<PathBuf> {
    let path = PathBuf::from(source);
    path.join("store").is_dir().then_some(path)
}
