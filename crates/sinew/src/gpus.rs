//! GPUs of this host, as the driver reports them, and GPUs that a user states.

use crate::bounded;
use sinew_sim::Gpus;
use std::process::Command;
use std::time::Duration;

/// Time that the driver has to answer.
const WITHIN: Duration = Duration::from_secs(10);
/// The driver's program.
const PROGRAM: &str = "nvidia-smi";
/// Its columns: name, MiB in all, MiB free.
const QUERY: [&str; 2] = [
    "--query-gpu=name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
];

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// Memory in bytes.
    pub(crate) bytes: u64,
    /// The part of it that no program uses.
    pub(crate) free: u64,
}

/// GPUs of this host that `CUDA_VISIBLE_DEVICES` does not hide; none without a driver.
pub(crate) fn found() -> Vec<Gpu> {
    let listed = bounded::output(Command::new(PROGRAM).args(QUERY), WITHIN);
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    listed.map_or(Vec::new(), |text| chosen(parse(&text), visible.as_deref()))
}

/// The lines of the driver's table; lines of another form are left out.
fn parse(text: &str) -> Vec<Gpu> {
    let line = |line: &str| {
        let mut cells = line.rsplitn(3, ',').map(str::trim);
        let mib = |cell: Option<&str>| cell?.parse::<u64>().ok()?.checked_mul(1 << 20);
        let (free, bytes) = (mib(cells.next())?, mib(cells.next())?);
        let name = cells.next()?.to_owned();
        Some(Gpu { name, bytes, free })
    };
    text.lines().filter_map(line).collect()
}

/// The GPUs of a list of numbers, up to the first that is none (as CUDA reads it). A list of names counts.
fn chosen(all: Vec<Gpu>, visible: Option<&str>) -> Vec<Gpu> {
    let Some(list) = visible else {
        return all;
    };
    let names: Vec<&str> = list.split(',').map(str::trim).collect();
    if names
        .iter()
        .any(|name| name.starts_with("GPU-") || name.starts_with("MIG-"))
    {
        return all.into_iter().take(names.len()).collect();
    }
    let numbers = names.iter().map_while(|name| name.parse::<usize>().ok());
    numbers.map_while(|at| all.get(at).cloned()).collect()
}

/// GPUs that a plan may use: all of them, with the memory of the smallest.
pub(crate) fn as_one_size(gpus: &[Gpu]) -> Option<Gpus> {
    let bytes = gpus.iter().map(|gpu| gpu.bytes).min()?;
    let count = gpus.len() as u64;
    Some(Gpus { count, bytes })
}

/// Reads `COUNTxGB`, such as `8x80`.
pub(crate) fn stated(text: &str) -> Result<Gpus, String> {
    let wrong =
        || "allowed: COUNTxGB, 1 to 1024 GPUs of 1 to 10000 GB each, such as 8x80".to_owned();
    let (count, gb) = text.split_once(['x', 'X']).ok_or_else(wrong)?;
    let count: u64 = count.trim().parse().map_err(|_| wrong())?;
    let gb = gb
        .trim()
        .trim_end_matches(['b', 'B'])
        .trim_end_matches(['g', 'G']);
    let gb: f64 = gb.trim().parse().map_err(|_| wrong())?;
    if !(1..=1024).contains(&count) || !(1.0..=10_000.0).contains(&gb) {
        return Err(wrong());
    }
    let bytes = (gb * 1e9) as u64;
    Ok(Gpus { count, bytes })
}

/// Bytes in GB of 10^9.
pub(crate) fn gb(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_table_is_read() {
        let text = "NVIDIA H100 80GB HBM3, 81559, 80000\nTesla, V100, 16384, 1\nno GPU\n";
        let gpus = parse(text);
        assert_eq!(gpus.len(), 2);
        assert_eq!(
            (gpus[0].name.as_str(), gpus[0].bytes),
            ("NVIDIA H100 80GB HBM3", 81_559 << 20)
        );
        assert_eq!(
            (gpus[1].name.as_str(), gpus[1].free),
            ("Tesla, V100", 1 << 20)
        );
        assert_eq!(
            as_one_size(&gpus),
            Some(Gpus {
                count: 2,
                bytes: 16_384 << 20
            })
        );
        assert_eq!(as_one_size(&[]), None);
        let names = |visible| {
            let found = chosen(gpus.clone(), visible);
            found
                .into_iter()
                .map(|gpu| gpu.bytes >> 30)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(None), [79, 16]);
        assert_eq!(names(Some("1")), [16]);
        assert_eq!(names(Some("1, 0")), [16, 79]);
        assert_eq!(names(Some("0,-1,1")), [79]);
        assert!(names(Some("")).is_empty());
        assert_eq!(names(Some("GPU-1234")), [79]);
    }

    #[test]
    fn stated_gpus_are_a_count_and_a_size() {
        let bytes = 80_000_000_000;
        assert_eq!(stated("8x80"), Ok(Gpus { count: 8, bytes }));
        assert_eq!(stated("1 x 80GB"), Ok(Gpus { count: 1, bytes }));
        for wrong in [
            "8", "x80", "0x80", "8x0", "8x-1", "2000x80", "8xmany", "8xNaN",
        ] {
            assert!(
                stated(wrong).unwrap_err().contains("such as 8x80"),
                "{wrong}"
            );
        }
    }
}
