//! Rules of recipes that train and sample at a Tinker service: `type = "tinker"` of `[trainer]`, `[engine]`.
//!
//! Its protocol has log-probabilities of whole sequences at temperature 1, and nothing below them. What needs
//! more is refused here, with the reason.

use crate::rule::Rules;
use crate::urls::is_http;
use crate::{EngineType, Formats, ModelSection, RunPlan};
use sinew_algo::Algorithm;

/// Prefix of models that a Tinker service has: `tinker:NAME`, or the address `tinker://...` of saved weights.
pub const TINKER: &str = "tinker:";

/// Factor of adapters at Tinker services, which no request can set.
const ALPHA: f32 = 32.0;

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let trains = plan.tinker().is_some();
    let samples = plan.engine.kind == EngineType::Tinker;
    rules.allowed(
        "engine.type",
        format!("{:?}", plan.engine.kind.name()),
        "\"tinker\" with trainer.type = \"tinker\", since the weights stay at the service, and only with it",
        trains == samples,
    );
    sources(plan, trains, rules);
    if trains {
        places(plan, rules);
        model(plan, rules);
        judges(plan, rules);
    }
}

/// Refuses models of a service elsewhere.
fn sources(plan: &RunPlan, trains: bool, rules: &mut Rules) {
    let scoring = [
        ("reference.model", &plan.reference),
        ("teacher.model", &plan.teacher),
    ];
    let scoring = scoring
        .into_iter()
        .filter_map(|(key, model)| Some((key, model.as_ref()?.model.clone())));
    for (key, source) in std::iter::once(("model.source", plan.model_source())).chain(scoring) {
        rules.custom(
            key,
            format!("{source:?}"),
            "has its weights at a Tinker service: set trainer.type and engine.type to \"tinker\", or take a \
             model with weights, such as \"hf:ORG/NAME\"",
            trains || !source.starts_with(TINKER),
        );
    }
}

/// Addresses and times.
fn places(plan: &RunPlan, rules: &mut Rules) {
    let (engine, url) = (
        &plan.engine,
        plan.tinker().and_then(|trainer| trainer.url.as_ref()),
    );
    rules.allowed(
        "trainer.url",
        url.map_or_else(|| "missing".to_owned(), |url| format!("{url:?}")),
        "the address of the Tinker service, which begins with http:// or https://",
        url.is_some_and(|url| is_http(url)),
    );
    rules.allowed(
        "engine.url",
        format!("{:?}", engine.urls()),
        "with type tinker one address at most, which begins with http:// or https://; left out: trainer.url",
        engine.urls().len() <= 1 && engine.urls().iter().all(|url| is_http(url)),
    );
    if let Some(seconds) = engine.timeout_s {
        rules.seconds("engine.timeout_s", seconds);
    }
    rules.allowed(
        "engine.formats",
        "\"guided\"",
        "\"advice\" or \"refuse\" with type tinker, whose protocol has no output formats",
        engine.formats != Some(Formats::Guided),
    );
}

/// The model and its adapters.
fn model(plan: &RunPlan, rules: &mut Rules) {
    let scratch = matches!(plan.model, ModelSection::Scratch { .. });
    rules.custom(
        "model.type",
        "\"scratch\"",
        "a Tinker service trains its own base models: use \"tinker:ORG/NAME\", or a folder with config.json \
         and tokenizer.json of its base model",
        !scratch,
    );
    let source = plan.model_source();
    let plain = source.strip_prefix("hf:").unwrap_or_default();
    rules.custom(
        "model.source",
        format!("{source:?}"),
        format!(
            "brings weights that nothing reads: use \"{TINKER}{plain}\", which brings tokenizer and \
             configuration only, or trainer.base_model with a folder"
        ),
        !source.starts_with("hf:"),
    );
    rules.custom(
        "model.source",
        format!("{source:?}"),
        "is an address of saved weights: write the base model as \"tinker:ORG/NAME\"; a run starts from the \
         weights of another one by \"run:DIR\"",
        !source.starts_with("tinker://"),
    );
    if let Some(lora) = &plan.train.lora {
        rules.allowed(
            "train.lora.alpha",
            lora.alpha,
            "32 with trainer.type = \"tinker\", whose services take no other",
            lora.alpha == ALPHA,
        );
    }
}

/// A judge of this process needs weights here.
fn judges(plan: &RunPlan, rules: &mut Rules) {
    for (name, judge) in &plan.judges {
        rules.custom(
            &format!("judge.{name}.model"),
            "\"policy\"",
            "runs the first weights in this process, and a Tinker service has them: name a model with weights, or a \
             server by `url`",
            !judge.is_policy(),
        );
    }
}

/// Adds rules that depend on the algorithm.
pub(crate) fn of_algorithm(plan: &RunPlan, algorithm: &Algorithm, rules: &mut Rules) {
    if plan.tinker().is_none() {
        return;
    }
    rules.custom(
        "algorithm.type",
        format!("{:?}", plan.algorithm.kind.name()),
        "reads the values of a critic, which a Tinker service does not have: take an algorithm that compares \
         the episodes of a group, such as \"grpo\"",
        !plan.needs().values,
    );
    let entropy = algorithm.loss().entropy;
    rules.allowed(
        "algorithm.entropy",
        entropy,
        "0 with trainer.type = \"tinker\", whose protocol has no entropies and no gradients of them",
        entropy == 0.0,
    );
}

#[cfg(test)]
mod tests {
    use crate::{RunPlan, parsed};

    const TABLES: &str =
        "[trainer]\ntype = \"tinker\"\nurl = \"http://a\"\n[engine]\ntype = \"tinker\"\n";

    fn parse(model: &str, algorithm: &str, more: &str) -> Result<RunPlan, String> {
        let head = format!(
            "name = \"t\"\nmodel = {model}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ {algorithm} }}\n"
        );
        parsed(&format!("{head}{more}"))
    }

    fn with(more: &str) -> Result<RunPlan, String> {
        let algorithm = "type = \"grpo\", dual_clip = 3.0";
        parse("\"tinker:org/name\"", algorithm, &format!("{TABLES}{more}"))
    }

    #[test]
    fn trainer_and_engine_are_one_service() {
        let plan = with("").unwrap();
        assert!(plan.tinker().is_some() && plan.torch().is_none());
        let effective = toml::to_string(&plan).unwrap();
        assert!(
            !effective.contains("weights_dir") && !effective.contains("replay_routing"),
            "{effective}"
        );
        assert_eq!(parsed(&effective).unwrap(), plan);
        let folder = "{ type = \"pretrained\", source = \"folder\" }";
        let algorithm = "type = \"grpo\", dual_clip = 3.0";
        parse(folder, algorithm, TABLES).unwrap();
        let trainer = "[trainer]\ntype = \"tinker\"\nurl = \"http://a\"\n";
        let why = parse(folder, algorithm, trainer).unwrap_err();
        assert!(why.contains("engine.type = \"embedded\""), "{why}");
        let why = parse(folder, algorithm, "[engine]\ntype = \"tinker\"\n").unwrap_err();
        assert!(why.contains("engine.type = \"tinker\""), "{why}");
    }

    #[test]
    fn what_a_service_lacks_is_refused_by_name() {
        for (more, named) in [
            ("[rollout]\ntemperature = 0.7\n", "rollout.temperature"),
            ("[rollout]\ntop_p = 0.9\n", "rollout.top_p"),
            ("[eval]\ntemperature = 0.5\n", "eval.temperature"),
            (
                "[train]\nlora = { rank = 8, alpha = 16.0 }\n",
                "train.lora.alpha",
            ),
            ("[rollout.cross_policy]\n", "engine.type"),
        ] {
            let why = with(more).unwrap_err();
            assert!(why.contains(named) && why.contains("tinker"), "{more}{why}");
        }
        let why = with("[train]\ndata_parallel = 2\n").unwrap_err();
        assert!(why.contains("embedded trainer only; remove it"), "{why}");
        with("[eval]\ntemperature = 0.0\n").unwrap();
        with("[train]\nlora = { rank = 8 }\n").unwrap();
        for (key, named) in [
            ("formats = \"guided\"", "engine.formats"),
            ("url = [\"http://a\", \"http://b\"]", "one address at most"),
            ("weights_dir = \"w\"", "engine.weights_dir"),
            ("logprobs = \"raw\"", "vllm or sglang"),
            ("kv_tokens = 4096", "engine.kv_tokens"),
        ] {
            let why = with(&format!("{key}\n")).unwrap_err();
            assert!(why.contains(named), "{key}: {why}");
        }
        with("formats = \"advice\"\napi_key_env = \"KEY\"\ntimeout_s = 60.0\n").unwrap();
        for (algorithm, named) in [
            ("type = \"grpo\"", "round differently"),
            (
                "type = \"grpo\", dual_clip = 3.0, entropy = 0.01",
                "algorithm.entropy",
            ),
            ("type = \"ppo\", dual_clip = 3.0", "critic"),
        ] {
            let why = parse("\"tinker:a/b\"", algorithm, TABLES).unwrap_err();
            assert!(why.contains(named), "{algorithm}: {why}");
        }
    }

    #[test]
    fn models_have_their_weights_where_they_are_trained() {
        let algorithm = "type = \"grpo\", dual_clip = 3.0";
        let why = parse("\"hf:a/b\"", algorithm, TABLES).unwrap_err();
        assert!(why.contains("\"tinker:a/b\""), "{why}");
        let why = parse("\"tinker:a/b\"", "type = \"grpo\"", "").unwrap_err();
        assert!(why.contains("at a Tinker service"), "{why}");
        let address = "\"tinker://s:train:0/weights/x\"";
        let why = parse(address, algorithm, TABLES).unwrap_err();
        assert!(why.contains("an address of saved weights"), "{why}");
        let keys = "[trainer]\ntype = \"torch\"\nbase_model = \"b\"\n";
        let why = parse("\"hf:a/b\"", algorithm, keys).unwrap_err();
        assert!(why.contains("type tinker only"), "{why}");
    }

    #[test]
    fn address_key_and_times_may_differ_between_sessions() {
        let hash = |more: &str, url: &str| {
            let mut moved = with(more).unwrap();
            if let Some(trainer) = &mut moved.trainer {
                trainer.url = Some(url.to_owned());
            }
            moved.hash().unwrap()
        };
        let here = hash("", "http://a");
        assert_eq!(hash("timeout_s = 9.0\n", "http://b"), here);
        assert_ne!(hash("formats = \"advice\"\n", "http://a"), here);
    }
}
