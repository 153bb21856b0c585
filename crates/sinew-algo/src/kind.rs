//! Names of algorithms. Their presets and computations are in [`crate::algorithms`].

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! kinds {
    ($($variant:ident $name:literal $module:ident),* $(,)?) => {
        /// An algorithm by name. Each has one file in [`crate::algorithms`].
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord,
            Serialize, Deserialize, schemars::JsonSchema,
        )]
        pub enum AlgorithmKind {
            $(
                #[doc = concat!("`", $name, "`: [`crate::algorithms::", stringify!($module), "`].")]
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl AlgorithmKind {
            /// All algorithms in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Name in recipes.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

kinds! {
    Grpo "grpo" grpo,
    DrGrpo "dr_grpo" dr_grpo,
    Dapo "dapo" dapo,
    Gspo "gspo" gspo,
    Sapo "sapo" sapo,
    Cispo "cispo" cispo,
    MaxRl "max_rl" max_rl,
    StarpoS "starpo_s" starpo_s,
    GrpoRoc "grpo_roc" grpo_roc,
    Gigpo "gigpo" gigpo,
    ProcessGrpo "process_grpo" process_grpo,
    AgentRl "agent_rl" agent_rl,
    Erpo "erpo" erpo,
    Rloo "rloo" rloo,
    Reinforce "reinforce" reinforce,
    ReinforcePp "reinforce_pp" reinforce_pp,
    ReinforcePpBaseline "reinforce_pp_baseline" reinforce_pp_baseline,
    Ppo "ppo" ppo,
    TurnPpo "turn_ppo" turn_ppo,
    DecoupledPpo "decoupled_ppo" decoupled_ppo,
    Opd "opd" opd,
    OpdTopK "opd_top_k" opd_top_k,
    Dpo "dpo" dpo,
    Sft "sft" sft,
}

impl fmt::Display for AlgorithmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
