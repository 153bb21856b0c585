//! Owners of sandboxes: an episode runs as a future, and the sandboxes that it asks for have its name.
//!
//! A provider that keeps something for an episode, such as recorded answers of the network, asks for the
//! name. The name is available in the future itself, and not in tasks that the future spawns.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};

/// An owner and how many of its sandboxes have a name.
struct Owner {
    name: String,
    named: AtomicU64,
}

tokio::task_local! {
    static OWNER: Owner;
}

/// Runs a future whose sandboxes are of `name`. Inside the future of another owner that one stays.
pub async fn owned<F: Future>(name: &str, future: F) -> F::Output {
    if OWNER.try_with(|_| ()).is_ok() {
        return future.await;
    }
    let owner = Owner {
        name: name.to_owned(),
        named: AtomicU64::new(0),
    };
    OWNER.scope(owner, future).await
}

/// The name of the next sandbox of this future's owner: `NAME`, then `NAME.2`, `NAME.3`, ... `None`: nobody
/// owns it.
pub fn next_of_owner() -> Option<String> {
    let name = |owner: &Owner| match owner.named.fetch_add(1, Ordering::Relaxed) + 1 {
        1 => owner.name.clone(),
        number => format!("{}.{number}", owner.name),
    };
    OWNER.try_with(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sandboxes_of_an_owner_are_numbered_and_the_outer_owner_stays() {
        assert_eq!(next_of_owner(), None);
        let names = owned("e1", async {
            let first = next_of_owner();
            let inner = owned("e2", async { next_of_owner() }).await;
            let apart = tokio::spawn(async { next_of_owner() }).await.unwrap();
            [first, inner, apart]
        });
        let expected = [Some("e1".to_owned()), Some("e1.2".to_owned()), None];
        assert_eq!(names.await, expected);
        assert_eq!(owned("e1", async { next_of_owner() }).await, expected[0]);
    }
}
