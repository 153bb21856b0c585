//! A policy in two real ranks of PyTorch on the CPU, compared with the embedded one. All parts run on one
//! server, since its start loads PyTorch twice; those that compare numbers of ranks start one with one rank.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod algorithms;
mod bench;
mod episodes;
mod files;
mod golden;
mod owners;
mod packings;
mod scores;
mod trained;

use bench::{Bench, batches, rows};
use sinew_model::Family;

#[test]
fn a_policy_in_two_ranks_is_the_embedded_one() {
    let bench = Bench::start();
    let model = bench.model(Family::Llama, 11);
    owners::versions_are_reported(&bench);
    bench.conformance(&model, &rows(0));
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        scores::three_updates_are_those_of_the_embedded_policy(&bench, family);
    }
    scores::masks_temperatures_and_values(&bench, &model);
    scores::the_most_likely_tokens(&bench, &model);
    scores::frozen_models(&bench, &model);
    scores::adapters(&bench, &model);
    files::a_checkpoint_is_one_of_the_hub_and_continues_in_another_session(&bench, &model);
    files::published_weights_are_read_from_their_folder(&bench, &model);
    owners::refused_requests_change_nothing(&bench, &model);
    owners::tokens_and_fences(&bench, &model);
    owners::time_is_measured(&bench, &model);
    golden::files_of_the_embedded_trainer(&bench);
    algorithms::all_train_as_the_embedded_ones(&bench);
    let single = Bench::with_ranks(1);
    packings::every_packing_gives_the_same_updates(&bench, &single);
    packings::adapters_are_the_same_on_one_and_two_ranks(&bench, &single);
    drop(single);
    // The last one: it takes the server.
    owners::a_killed_rank_is_named(bench, &model);
}

#[test]
fn rows_fill_an_odd_number_of_micro_batches() {
    // The last wave of two lanes lacks one.
    assert_eq!(batches(&rows(0)).len() % 2, 1);
}
