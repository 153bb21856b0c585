//! The columns of a packed micro-batch.

use super::*;
use sinew_train::pack::{pack, pack_routed};
use sinew_types::{EpisodeId, RouteSpan, RowMasks, TrainRow};

/// A row that trains its tokens from 2 on, the last of them under a mask.
fn row(tokens: &[u32]) -> TrainRow {
    let n = tokens.len();
    let mut weights = vec![1.0; n];
    weights[..2].fill(0.0);
    let mut mask = vec![0; 2];
    for &token in tokens {
        mask[token as usize / 32] |= 1 << (token % 32);
    }
    let mut rows = vec![RowMasks::ALL; n];
    rows[n - 1] = 0;
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights,
        advantages: vec![1.0; n],
        temperatures: vec![0.5; n],
        behaviour_logprobs: vec![0.0; n],
        masks: Some(RowMasks {
            words_per_mask: 2,
            table: mask,
            rows,
        }),
        ..TrainRow::default()
    }
}

#[test]
fn a_lane_has_the_columns_of_its_micro_batch() {
    let packing = pack(&[row(&[5, 6, 7, 40]), row(&[5, 6, 8, 9])], 64).unwrap();
    let lane = Lane::of(&packing.micro_batches[0]);
    let numbers = |bin: &Bin<'_>| bin.values::<u32>().unwrap();
    assert_eq!(numbers(&lane.tokens), [5, 6, 7, 8]);
    // The prefix 5 6, and its two branches at position 2.
    assert_eq!(
        numbers(&lane.segments),
        [0, 2, 0, 0, 2, 1, 2, 1, 3, 1, 2, 1]
    );
    assert_eq!(numbers(&lane.rows), [1, 1, 2, 3]);
    assert_eq!(numbers(&lane.targets), [7, 8, 40, 9]);
    assert_eq!(lane.temperatures.values::<f32>().unwrap(), [0.5; 4]);
    let (all, first) = (u32::MAX, 1 << 5 | 1 << 6);
    let [a, b] = [first | 1 << 8 | 1 << 9, first | 1 << 7];
    assert!(b < a, "masks are sorted");
    assert_eq!(numbers(&lane.masks), [all, all, 0, 1]);
    assert_eq!(lane.mask_words, 2);
    assert_eq!(numbers(&lane.mask_table), [b, 1 << 8, a, 0]);
    assert!(lane.routes.0.is_empty());
}

#[test]
fn a_lane_has_the_experts_of_its_tokens() {
    let mut row = row(&[5, 6, 7]);
    row.routes = vec![RouteSpan {
        start: 1,
        layers: 2,
        top_k: 2,
        wide: true,
        experts: [1, 0, 2, 1, 3, 0, 4, 0].into(),
    }];
    let packing = pack_routed(&[row], 64, true).unwrap();
    let lane = Lane::of(&packing.micro_batches[0]);
    let free = u16::MAX;
    let expected = [free, free, free, free, 1, 258, 3, 4];
    assert_eq!(lane.routes.values::<u16>().unwrap(), expected);
    assert_eq!((lane.route_layers, lane.route_top_k), (2, 2));
}

#[test]
fn columns_that_are_cut_have_no_values() {
    let bin = Bin(Cow::Borrowed(&[1, 2, 3][..]));
    assert_eq!(bin.values::<f32>(), None);
    let bytes = rmp_serde::to_vec_named(&Bin::of(&[1.0f32, -2.0])).unwrap();
    assert_eq!(bytes[..2], [0xc4, 8]);
    let read: Bin<'_> = rmp_serde::from_slice(&bytes).unwrap();
    assert_eq!(read.values::<f32>().unwrap(), [1.0, -2.0]);
}

#[test]
fn errors_of_the_server_are_read() {
    let body =
        serde_json::json!({"error": {"kind": "memory", "text": "t", "rank": 2, "phase": null}});
    let bytes = rmp_serde::to_vec_named(&body).unwrap();
    let expected = Fault {
        text: "t".into(),
        rank: Some(2),
        phase: None,
    };
    assert_eq!(reported(&bytes), Some(TorchError::Memory(expected)));
    let other = serde_json::json!({"error": {"kind": "other"}});
    assert_eq!(reported(&rmp_serde::to_vec_named(&other).unwrap()), None);
    assert_eq!(reported(b"<html>"), None);
}

#[test]
fn the_answer_to_open_may_lack_what_only_messages_need() {
    let body = serde_json::json!({
        "lanes": 2, "shared": false, "why_flat": "a window", "seconds": 0.1, "peak_bytes": [1, 2],
        "versions": {"torch": "2.9.0", "cuda": null},
    });
    let bytes = rmp_serde::to_vec_named(&body).unwrap();
    let info: crate::status::ServerInfo = decode("open", &bytes).unwrap();
    assert_eq!(
        (info.lanes, info.why_flat.as_deref()),
        (2, Some("a window"))
    );
    assert_eq!(info.versions["cuda"], None);
}
