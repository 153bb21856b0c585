//! Memory of gradients: given back while they are zero.

use crate::support::{device, tiny};
use crate::train::{add_gradients, tree_case};
use sinew_model::{Activations, Grads, Keep, TrainModel, Weights};

/// Only zeros give their memory back, and a backward pass takes new memory.
#[test]
fn released_gradients_are_zero() {
    let dev = device();
    let params = tiny("llama").params;
    let weights = Weights::full(&params);
    let case = tree_case().1;
    let model = TrainModel::new(params.config(), 256).unwrap();
    let mut acts = Activations::new(Keep::All);
    let mut grads = Grads::of_params(params.layout());
    let bytes = grads.bytes();
    assert_eq!(bytes, 4 * params.layout().total());
    let mut pass =
        |grads: &mut Grads| add_gradients(&model, &dev, weights, &case, &mut acts, grads);
    pass(&mut grads);
    let first = grads.values().to_vec();
    grads.release();
    assert!(!grads.is_released(), "there are gradients");
    grads.restart(&dev);
    grads.release();
    assert_eq!((grads.is_released(), grads.bytes()), (true, 0));
    grads.restart(&dev);
    assert!(grads.is_released(), "zeros need no memory");
    pass(&mut grads);
    assert_eq!(grads.values(), first);
    grads.zero();
    grads.release();
    grads.settle(&dev);
    assert_eq!(grads.bytes(), bytes);
    assert!(grads.values().iter().all(|&g| g == 0.0));
}
