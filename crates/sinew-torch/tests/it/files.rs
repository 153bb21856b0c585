//! Files that the ranks write.

use crate::bench::{Bench, assert_weights, batches, rows, tensors, update, weights};
use half::bf16;
use sinew_model::{ModelFiles, load_model};
use sinew_torch::TorchDtype;
use sinew_train::Policy;
use sinew_train::checkpoint::CheckpointStore;
use sinew_types::{Dtype, PolicyVersion};
use std::path::Path;

pub(crate) fn a_checkpoint_is_one_of_the_hub_and_continues_in_another_session(
    bench: &Bench,
    model: &Path,
) {
    let batches = batches(&rows(2));
    let store = CheckpointStore::open(bench.dir.path().join("checkpoints"), 2).unwrap();
    let mut torch = bench.open(model, |_| {});
    update(&mut torch, &batches, 1);
    let mut draft = store.begin(1).unwrap();
    let files = torch.save(&mut draft).unwrap();
    draft.commit().unwrap();
    let saved = weights(&mut torch);
    let (scores, norm) = update(&mut torch, &batches, 2);
    let last = weights(&mut torch);
    drop(torch);

    // Every sum is checked here.
    let loaded = store.load().unwrap().unwrap();
    assert_eq!(files, ["model.safetensors"]);
    assert!(loaded.path.join("config.json").is_file());
    let own = load_model(&ModelFiles::Dir(loaded.path.clone())).unwrap();
    assert_weights("saved", &tensors(&own.params), &saved);
    let mut torch = bench.open(model, |_| {});
    torch.load(&loaded, &files, 1).unwrap();
    assert_eq!(weights(&mut torch), saved);
    let (again, norm_again) = update(&mut torch, &batches, 2);
    assert_eq!((again, norm_again), (scores, norm), "equal bits");
    assert_eq!(weights(&mut torch), last, "equal bits");
}

pub(crate) fn published_weights_are_read_from_their_folder(bench: &Bench, model: &Path) {
    let root = bench.dir.path().join("published");
    let mut torch = bench.open(model, |setup| {
        setup.publish.root = root.clone();
        setup.publish.dtype = TorchDtype::Bf16;
        setup.publish.untied = true;
    });
    let own = load_model(&ModelFiles::Dir(model.to_owned())).unwrap();
    let expected = tensors(&own.params);
    let source = torch.weights(PolicyVersion(12)).unwrap();
    let folder = source.folder().unwrap();
    assert_eq!(folder.path, root.join(".v00000012.trainer"));
    assert!(!folder.is_adapter);
    assert_eq!(folder.tensors.len(), expected.len() + 1);
    for tensor in &folder.tensors {
        let view = source.tensor(&tensor.name).unwrap();
        assert_eq!(view.dtype(), Dtype::Bf16);
        let sum = blake3::hash(view.bytes()).to_hex();
        assert_eq!(sum.as_str(), tensor.blake3, "{}", tensor.name);
        let name = match tensor.name.as_str() {
            "lm_head.weight" => "model.embed_tokens.weight",
            name => name,
        };
        let (shape, values) = &expected[name];
        assert_eq!(view.shape(), shape);
        let rounded: Vec<f32> = values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
        assert_eq!(*view.into_f32(), rounded, "{name}");
    }
    // A version is replaced, and the last one stays readable.
    torch.weights(PolicyVersion(12)).unwrap();
    torch.weights(PolicyVersion(13)).unwrap();
    assert!(source.tensor("lm_head.weight").is_some());
    assert!(root.join(".v00000012.trainer/model.safetensors").is_file());
}
