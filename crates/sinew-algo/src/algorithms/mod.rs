//! Algorithms, one file each, with formula, paper, preset and specific computations.

pub mod agent_rl;
pub mod cispo;
pub mod dapo;
pub mod decoupled_ppo;
pub mod dpo;
pub mod dr_grpo;
pub mod erpo;
pub mod gigpo;
pub mod grpo;
pub mod grpo_roc;
pub mod gspo;
pub mod max_rl;
pub mod opd;
pub mod opd_top_k;
pub mod ppo;
pub mod process_grpo;
pub mod reinforce;
pub mod reinforce_pp;
pub mod reinforce_pp_baseline;
pub mod rloo;
pub mod sapo;
pub mod sft;
pub mod starpo_s;
pub mod turn_ppo;

mod normalize;

use crate::batch::Batch;
use crate::composition::{Advantage, Composition};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use crate::path_signals::{required, token_rewards, value_after};
use crate::report::AlgoReport;
pub(crate) use normalize::normalize;

impl AlgorithmKind {
    /// Default composition of the algorithm.
    pub fn preset(self) -> Composition {
        match self {
            Self::Grpo => grpo::preset(),
            Self::DrGrpo => dr_grpo::preset(),
            Self::Dapo => dapo::preset(),
            Self::Gspo => gspo::preset(),
            Self::Sapo => sapo::preset(),
            Self::Cispo => cispo::preset(),
            Self::MaxRl => max_rl::preset(),
            Self::StarpoS => starpo_s::preset(),
            Self::GrpoRoc => grpo_roc::preset(),
            Self::Gigpo => gigpo::preset(),
            Self::ProcessGrpo => process_grpo::preset(),
            Self::AgentRl => agent_rl::preset(),
            Self::Erpo => erpo::preset(),
            Self::Rloo => rloo::preset(),
            Self::Reinforce => reinforce::preset(),
            Self::ReinforcePp => reinforce_pp::preset(),
            Self::ReinforcePpBaseline => reinforce_pp_baseline::preset(),
            Self::Ppo => ppo::preset(),
            Self::TurnPpo => turn_ppo::preset(),
            Self::DecoupledPpo => decoupled_ppo::preset(),
            Self::Opd => opd::preset(),
            Self::OpdTopK => opd_top_k::preset(),
            Self::Dpo => dpo::preset(),
            Self::Sft => sft::preset(),
        }
    }
}

/// Computes advantages and returns of all paths in the batch.
pub(crate) fn advantages(
    c: &Composition,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    match c.advantage {
        Advantage::Group { baseline, scale } => {
            grpo::advantages(baseline, scale, c.rewards.process, batch);
            Ok(())
        }
        Advantage::ReturnToGo { gamma } => reinforce_pp::advantages(c, gamma, batch),
        Advantage::Gae { gamma, lambda } => ppo::advantages(c, gamma, lambda, batch),
        Advantage::TurnGae {
            gamma_turn,
            lambda_turn,
            gamma,
            lambda,
        } => {
            let discounts = turn_ppo::Discounts {
                gamma_turn,
                lambda_turn,
                gamma,
                lambda,
            };
            turn_ppo::advantages(c, discounts, batch)
        }
        Advantage::Gigpo {
            omega,
            gamma,
            std_epsilon,
        } => {
            let parameters = gigpo::Parameters {
                omega,
                gamma,
                std_epsilon,
            };
            gigpo::advantages(c, parameters, batch, report)
        }
        Advantage::Preference { beta } => dpo::advantages(c, beta, batch, report),
        Advantage::One => {
            for i in batch.members().collect::<Vec<_>>() {
                batch.broadcast(i, 1.0);
            }
            Ok(())
        }
        Advantage::None => Ok(()),
    }
}
