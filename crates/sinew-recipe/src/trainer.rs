//! `[trainer]`: the program that computes gradients.

use crate::rule::Rules;
use crate::section::{choice, section};
use crate::{Api, EngineType, RunPlan, TrainMode};

choice! {
    /// The program that computes gradients.
    TrainerType {
        /// This process, on the CPU.
        Embedded = "embedded",
        /// PyTorch processes on GPUs or CPUs.
        Torch = "torch",
        /// A Tinker service, which keeps weights and optimizer state.
        Tinker = "tinker",
    }
}

choice! {
    /// Type of the numbers that PyTorch computes with; weights and moments are f32 in any case.
    TrainerDtype {
        F32 = "f32",
        Bf16 = "bf16",
    }
}

choice! {
    /// Implementation of attention in PyTorch.
    Attention {
        /// FlexAttention on GPUs if prefixes are shared, SDPA otherwise.
        Auto = "auto",
        Flex = "flex",
        Sdpa = "sdpa",
        Eager = "eager",
    }
}

choice! {
    /// Whether rows that begin with the same tokens share their computation.
    Sharing {
        /// If the model's scores do not depend on it, which is tested at the start.
        Auto = "auto",
        /// Never: each row is computed by itself.
        Flat = "flat",
    }
}

choice! {
    /// Activations that are computed again in the backward pass.
    Checkpointing {
        /// All inside a layer: the least memory, a third more time.
        Full = "full",
        /// None.
        None = "none",
        /// As `full`, with the inputs of layers in host memory.
        Offload = "offload",
    }
}

choice! {
    /// The experts by which a mixture-of-experts model computes sampled tokens in the trainer.
    ReplayRouting {
        /// Those that sampled, where the engine reports them; else those of the trainer's routers.
        Auto = "auto",
        /// Those of the trainer's routers.
        Off = "off",
    }
}

choice! {
    /// Devices of trainer and engine.
    Place {
        /// The trainer has its own GPUs.
        Own = "own",
        /// Both use the same GPUs in turns.
        Turns = "turns",
    }
}

section! {
    /// The program that computes gradients; left out: this one, on the CPU.
    TrainerKeys => TrainerPlan, "trainer" {
        /// The program that computes gradients.
        kind as "type": TrainerType = TrainerType::Embedded;
        /// PyTorch processes on this host, 1 to 1024; left out: one for each GPU, or a single one on the CPU.
        ranks: usize;
        /// Type of the numbers that PyTorch computes with; weights and moments are f32 in any case. Left
        /// out: `bf16` with vLLM or SGLang if there are GPUs, otherwise `f32`.
        dtype: TrainerDtype;
        /// Implementation of attention.
        attention: Attention = Attention::Auto;
        /// Whether rows that begin with the same tokens share their computation.
        sharing: Sharing = Sharing::Auto;
        /// Activations that are computed again in the backward pass.
        checkpointing: Checkpointing = Checkpointing::Full;
        /// Devices of trainer and engine: `own`, or the same GPUs in `turns` with vLLM or SGLang.
        place: Place = Place::Own;
        /// Experts of a mixture-of-experts model: `auto` uses those that sampled, which vLLM reports with
        /// `engine.api = "generate"` and `--enable-return-routed-experts`; `off` lets the routers choose
        /// again.
        replay_routing: ReplayRouting = ReplayRouting::Auto;
        /// Coefficient of the load-balancing loss of a mixture-of-experts model's routers; 0: none.
        router_aux_loss: f32 = 0.0, in 0.0 to 1000.0;
        /// Equal bits on equal GPUs with equal `ranks`, at the cost of time. On a CPU they are always equal.
        deterministic: bool = false;
        /// Python with PyTorch; left out: the environment of `sinew setup torch`.
        python: String;
        /// Address of the Tinker service, or of PyTorch processes that were started by other means, such as
        /// `torchrun`. Left out with type `torch`: the run starts its own.
        url: String;
        /// File with the token of the PyTorch trainer at `url`.
        token_file: String;
        /// Name of the base model at the Tinker service; left out: NAME of `model = "tinker:NAME"`, or the
        /// only one that the service trains.
        base_model: String;
        /// Environment variable with the key of the Tinker service; left out: `TINKER_API_KEY`.
        api_key_env: String;
        /// Longest time in seconds that the trainer may take for one command.
        timeout_s: f64 = 1800.0;
        /// Number of times that a run starts its trainer again after it was lost; it then repeats the steps
        /// since the last checkpoint from stored episodes.
        restarts: u32 = 3, in 0 to 1000;
    }
}

impl TrainerPlan {
    /// Resets the keys that say where and how long a trainer runs. Unless it is deterministic, the number of
    /// its processes is one of them.
    pub(crate) fn clear_bounds(&mut self) {
        let default = Self::default();
        if !self.deterministic {
            self.ranks = default.ranks;
        }
        self.python = default.python;
        self.url = default.url;
        self.token_file = default.token_file;
        self.api_key_env = default.api_key_env;
        self.timeout_s = default.timeout_s;
        self.restarts = default.restarts;
    }
}

impl RunPlan {
    /// Settings of the PyTorch trainer, if it trains.
    pub fn torch(&self) -> Option<&TrainerPlan> {
        let trainer = self.trainer.as_ref();
        trainer.filter(|trainer| trainer.kind == TrainerType::Torch)
    }

    /// Settings of the Tinker service, if it trains.
    pub fn tinker(&self) -> Option<&TrainerPlan> {
        let trainer = self.trainer.as_ref();
        trainer.filter(|trainer| trainer.kind == TrainerType::Tinker)
    }

    /// Whether the trainer uses the experts that sampled, and the engine may report them.
    pub fn replays_routing(&self) -> bool {
        let reports =
            self.engine.kind == EngineType::Vllm && self.engine.api == Some(Api::Generate);
        let auto = |trainer: &TrainerPlan| trainer.replay_routing == ReplayRouting::Auto;
        reports && self.torch().is_some_and(auto)
    }
}

/// Keys of PyTorch.
const OF_TORCH: [&str; 11] = [
    "ranks",
    "dtype",
    "attention",
    "sharing",
    "checkpointing",
    "place",
    "replay_routing",
    "router_aux_loss",
    "deterministic",
    "python",
    "token_file",
];
/// Keys of a Tinker service.
const OF_TINKER: [&str; 2] = ["base_model", "api_key_env"];
/// Keys of both.
const OF_BOTH: [&str; 3] = ["url", "timeout_s", "restarts"];

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let Some(t) = &plan.trainer else {
        return;
    };
    t.ranges(rules);
    let (torch, tinker) = (plan.torch().is_some(), plan.tinker().is_some());
    let ranks = t.ranks.unwrap_or(1);
    rules.allowed(
        "trainer.ranks",
        ranks,
        "1 to 1024",
        (1..=1024).contains(&ranks),
    );
    rules.seconds("trainer.timeout_s", t.timeout_s);
    for (keys, types, has_effect) in [
        (&OF_TORCH[..], "torch", torch),
        (&OF_TINKER[..], "tinker", tinker),
        (&OF_BOTH[..], "torch or tinker", torch || tinker),
    ] {
        for key in keys {
            let reason = format!("has an effect with type {types} only; remove it");
            rules.unused(&format!("trainer.{key}"), reason, has_effect);
        }
    }
    let own = !torch || t.url.is_none();
    for key in ["ranks", "python", "restarts"] {
        let reason = "has no effect with trainer.url, whose processes run already; remove it";
        rules.unused(&format!("trainer.{key}"), reason, own);
    }
    rules.allowed(
        "trainer.token_file",
        format!("{:?}", t.token_file),
        "a file together with trainer.url, none without it",
        !torch || t.url.is_some() == t.token_file.is_some(),
    );
    let instead = if torch {
        "use trainer.ranks"
    } else {
        "remove it"
    };
    rules.unused(
        "train.data_parallel",
        format!("has an effect with the embedded trainer only; {instead}"),
        !torch && !tinker,
    );
    place(plan, t, rules);
}

/// Taking turns needs an engine that frees its GPUs, and no generation during training.
fn place(plan: &RunPlan, t: &TrainerPlan, rules: &mut Rules) {
    let turns = t.place == Place::Turns;
    let servers = matches!(plan.engine.kind, EngineType::Vllm | EngineType::Sglang);
    rules.allowed(
        "trainer.place",
        "\"turns\"",
        "turns only with engine.type vllm or sglang, which free their GPUs, and train.mode = \"sync\"",
        !turns || (servers && plan.train.mode == TrainMode::Sync),
    );
}

#[cfg(test)]
mod tests {
    use crate::parsed_bounded as parse;

    #[test]
    fn experts_are_replayed_where_the_engine_reports_them() {
        let torch = |more: &str| format!("[trainer]\ntype = \"torch\"\n{more}\n");
        let vllm = |api: &str| {
            let servers = "[engine]\ntype = \"vllm\"\nurl = \"http://a\"\nweights_dir = \"w\"\n";
            format!("{servers}{api}\n")
        };
        let replays = |text: String| parse(&text).unwrap().replays_routing();
        let generate = vllm("api = \"generate\"");
        assert!(replays(torch("") + &generate));
        assert!(!replays(torch("replay_routing = \"off\"") + &generate));
        assert!(!replays(torch("") + &vllm("")));
        assert!(!replays(torch("")));
        let loss = parse(&torch("router_aux_loss = 0.001")).unwrap();
        assert_eq!(loss.torch().unwrap().router_aux_loss, 0.001);
        let why = parse(&torch("router_aux_loss = -1.0")).unwrap_err();
        assert!(
            why.contains("trainer.router_aux_loss") && why.contains("0 to 1000"),
            "{why}"
        );
        let why = parse("[trainer]\nreplay_routing = \"off\"\n").unwrap_err();
        assert!(
            why.contains("trainer.replay_routing") && why.contains("torch"),
            "{why}"
        );
    }
}
