//! Tensors of the wire, in protobuf and in JSON: checked, and made dense.
//!
//! A sparse tensor names few numbers of many. Made dense it can be larger than the request by any factor, so
//! a [`Budget`] bounds the numbers of all tensors of a request.

use super::proto::{self, BFLOAT16, Encoding, FLOAT32, INT32, INT64, SparseCsr};
use crate::error::TinkerError;
use crate::types::{Tensor, TensorValues};
use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;
use serde_json::Number;

/// Most axes of a tensor.
const MAX_AXES: usize = 8;

/// Numbers that the tensors of a request may still have.
#[derive(Debug)]
pub(crate) struct Budget {
    left: u64,
    limit: u64,
}

impl Budget {
    /// For a request whose tensors may have `limit` numbers once they are dense.
    pub(crate) fn new(limit: u64) -> Self {
        Self { left: limit, limit }
    }

    fn take(&mut self, field: &str, numbers: u64) -> Result<(), TinkerError> {
        match self.left.checked_sub(numbers) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(TinkerError::Limit {
                what: format!("the numbers of all tensors up to {field}"),
                value: (self.limit - self.left).saturating_add(numbers),
                limit: self.limit,
                hint: "send fewer datums in one request, or fewer columns".into(),
            }),
        }
    }
}

/// Places of the numbers of a sparse matrix: compressed rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Csr {
    /// Start of each row among the numbers, and the end of the last row.
    pub(crate) rows: Vec<u64>,
    /// Column of each number.
    pub(crate) columns: Vec<u64>,
}

/// A tensor as it was sent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SentTensor {
    shape: Vec<usize>,
    values: TensorValues,
    csr: Option<Csr>,
}

impl SentTensor {
    /// Makes it dense, with `fill` where a sparse one lists nothing.
    ///
    /// # Errors
    /// If the shape does not fit, or the budget is spent.
    pub(crate) fn dense(
        self,
        field: &str,
        fill: i64,
        budget: &mut Budget,
    ) -> Result<Tensor, TinkerError> {
        let Self { shape, values, csr } = self;
        let Some(csr) = csr else {
            budget.take(field, values.len() as u64)?;
            return Tensor::new(field, shape, values);
        };
        let &[rows, columns] = shape.as_slice() else {
            let allowed = "[rows, columns] for a sparse tensor";
            return Err(TinkerError::value(
                format!("{field}.shape"),
                format!("{shape:?}"),
                allowed,
            ));
        };
        let size = (rows as u64).saturating_mul(columns as u64);
        budget.take(field, size)?;
        csr.check(field, rows, columns, values.len())?;
        let size = size as usize;
        let values = match values {
            TensorValues::F32(listed) => {
                let mut all = vec![fill as f32; size];
                csr.each(columns, |place, at| all[place] = listed[at]);
                TensorValues::F32(all)
            }
            TensorValues::I64(listed) => {
                let mut all = vec![fill; size];
                csr.each(columns, |place, at| all[place] = listed[at]);
                TensorValues::I64(all)
            }
        };
        Tensor::new(field, shape, values)
    }

    /// Takes the places of a sparse tensor's numbers.
    pub(crate) fn layout(&self) -> Option<Csr> {
        self.csr.clone()
    }
}

impl Csr {
    /// Checks that the places are those of `count` numbers in a matrix, each place at most once.
    fn check(
        &self,
        field: &str,
        rows: usize,
        columns: usize,
        count: usize,
    ) -> Result<(), TinkerError> {
        let name = format!("{field}.sparse_crow_indices");
        if self.rows.len() != rows + 1 {
            let allowed = format!("{} starts for {rows} rows and the end", rows + 1);
            let value = format!("{} numbers", self.rows.len());
            return Err(TinkerError::value(name, value, allowed));
        }
        let rising = self.rows.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = (self.rows.first(), self.rows.last());
        if !rising || ends != (Some(&0), Some(&(count as u64))) {
            let allowed = format!("numbers that rise from 0 to {count}, which values are listed");
            return Err(TinkerError::value(name, "another row of numbers", allowed));
        }
        let name = format!("{field}.sparse_col_indices");
        if self.columns.len() != count {
            let value = format!("{} numbers", self.columns.len());
            return Err(TinkerError::value(
                name,
                value,
                format!("{count}, one a value"),
            ));
        }
        for pair in self.rows.windows(2) {
            let row = &self.columns[pair[0] as usize..pair[1] as usize];
            let sorted = row.windows(2).all(|pair| pair[0] < pair[1]);
            if !sorted || row.last().is_some_and(|&last| last >= columns as u64) {
                let allowed = format!("rising columns below {columns} in each row");
                return Err(TinkerError::value(name, format!("{row:?}"), allowed));
            }
        }
        Ok(())
    }

    /// Calls `with` with the dense index and the listed index of each number, of places that were checked.
    fn each(&self, columns: usize, mut with: impl FnMut(usize, usize)) {
        for (row, pair) in self.rows.windows(2).enumerate() {
            for at in pair[0] as usize..pair[1] as usize {
                with(row * columns + self.columns[at] as usize, at);
            }
        }
    }

    /// Lists the numbers of a dense `float32` matrix that stand at these places, in protobuf. Places that do
    /// not fit the matrix give a dense message.
    pub(crate) fn listed(&self, tensor: &Tensor) -> proto::Tensor {
        let (&[rows, columns], TensorValues::F32(all)) = (tensor.shape.as_slice(), &tensor.values)
        else {
            return to_proto(tensor);
        };
        let count = self.columns.len();
        if self.check("layout", rows, columns, count).is_err() {
            return to_proto(tensor);
        }
        let mut listed = Vec::with_capacity(count);
        self.each(columns, |place, _| listed.push(all[place]));
        let sparse = SparseCsr {
            values: float_bytes(&listed),
            crow_indices: index_bytes(&self.rows),
            col_indices: index_bytes(&self.columns),
        };
        proto::Tensor {
            encoding: Some(Encoding::SparseCsr(sparse)),
            dtype: FLOAT32,
            shape: signed_shape(&tensor.shape),
        }
    }
}

/// Reads a tensor of protobuf.
pub(crate) fn from_proto(field: &str, sent: &proto::Tensor) -> Result<SentTensor, TinkerError> {
    let (bytes, csr) = match &sent.encoding {
        Some(Encoding::Dense(bytes)) => (bytes, None),
        Some(Encoding::SparseCsr(sparse)) => {
            let rows = indices(field, "sparse_crow_indices", &sparse.crow_indices)?;
            let columns = indices(field, "sparse_col_indices", &sparse.col_indices)?;
            (&sparse.values, Some(Csr { rows, columns }))
        }
        None => {
            let hint = "a tensor has dense bytes, or sparse_csr with values, rows and columns";
            return Err(TinkerError::missing(format!("{field}.data"), hint));
        }
    };
    let values = numbers(field, sent.dtype, bytes)?;
    // A vector may leave its shape out; one without numbers has none, either.
    let shape = if sent.shape.is_empty() && csr.is_none() {
        vec![values.len()]
    } else {
        checked_shape(field, &sent.shape)?
    };
    Ok(SentTensor { shape, values, csr })
}

/// A dense tensor as protobuf.
pub(crate) fn to_proto(tensor: &Tensor) -> proto::Tensor {
    proto::Tensor {
        encoding: Some(Encoding::Dense(value_bytes(&tensor.values))),
        dtype: proto_dtype(&tensor.values),
        shape: signed_shape(&tensor.shape),
    }
}

/// The number of a type in protobuf.
pub(crate) fn proto_dtype(values: &TensorValues) -> i32 {
    match values {
        TensorValues::F32(_) => FLOAT32,
        TensorValues::I64(_) => INT64,
    }
}

/// The numbers of a tensor as little-endian bytes.
pub(crate) fn value_bytes(values: &TensorValues) -> Bytes {
    match values {
        TensorValues::F32(values) => float_bytes(values),
        TensorValues::I64(values) => integer_bytes(values.iter().copied()),
    }
}

/// `float32` numbers as little-endian bytes.
pub(crate) fn float_bytes(values: &[f32]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(values.len() * 4);
    values.iter().for_each(|&value| bytes.put_f32_le(value));
    bytes.freeze()
}

/// `int64` numbers as little-endian bytes.
pub(crate) fn integer_bytes(values: impl ExactSizeIterator<Item = i64>) -> Bytes {
    let mut bytes = BytesMut::with_capacity(values.len() * 8);
    values.for_each(|value| bytes.put_i64_le(value));
    bytes.freeze()
}

/// Token ids as little-endian `int32`.
pub(crate) fn token_bytes(tokens: impl ExactSizeIterator<Item = u32>) -> Bytes {
    let mut bytes = BytesMut::with_capacity(tokens.len() * 4);
    tokens.for_each(|token| bytes.put_i32_le(token.cast_signed()));
    bytes.freeze()
}

fn index_bytes(values: &[u64]) -> Bytes {
    integer_bytes(values.iter().map(|&value| value.cast_signed()))
}

fn signed_shape(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&axis| axis as i64).collect()
}

/// Splits bytes into pieces of one number each.
fn pieces<'a, const N: usize>(
    field: &str,
    bytes: &'a [u8],
    dtype: &str,
) -> Result<&'a [[u8; N]], TinkerError> {
    let (pieces, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() {
        return Ok(pieces);
    }
    let value = format!("{} bytes", bytes.len());
    let allowed = format!("a multiple of {N} bytes for {dtype}");
    Err(TinkerError::value(format!("{field}.data"), value, allowed))
}

/// Reads numbers of a type; the narrow types become the two that the protocol shows.
pub(crate) fn numbers(field: &str, dtype: i32, bytes: &[u8]) -> Result<TensorValues, TinkerError> {
    Ok(match dtype {
        FLOAT32 => {
            let all = pieces::<4>(field, bytes, "float32")?;
            TensorValues::F32(all.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
        BFLOAT16 => {
            let all = pieces::<2>(field, bytes, "bfloat16")?;
            let wide = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            TensorValues::F32(all.iter().map(wide).collect())
        }
        INT64 => {
            let all = pieces::<8>(field, bytes, "int64")?;
            TensorValues::I64(all.iter().map(|b| i64::from_le_bytes(*b)).collect())
        }
        INT32 => {
            let all = pieces::<4>(field, bytes, "int32")?;
            let wide = |b: &[u8; 4]| i64::from(i32::from_le_bytes(*b));
            TensorValues::I64(all.iter().map(wide).collect())
        }
        other => {
            let allowed = "1 (float32), 2 (int64), 3 (int32) or 4 (bfloat16)";
            return Err(TinkerError::value(format!("{field}.dtype"), other, allowed));
        }
    })
}

/// Reads `int64` indices, none of which is negative.
pub(crate) fn indices(field: &str, part: &str, bytes: &[u8]) -> Result<Vec<u64>, TinkerError> {
    let name = format!("{field}.{part}");
    let all = pieces::<8>(&name, bytes, "int64")?;
    unsigned(&name, all.iter().map(|b| i64::from_le_bytes(*b)))
}

fn unsigned(name: &str, values: impl Iterator<Item = i64>) -> Result<Vec<u64>, TinkerError> {
    let index = |value: i64| {
        u64::try_from(value).map_err(|_| TinkerError::value(name, value, "indices of 0 or more"))
    };
    values.map(index).collect()
}

fn checked_shape(field: &str, shape: &[i64]) -> Result<Vec<usize>, TinkerError> {
    let axes: Option<Vec<usize>> = shape.iter().map(|&a| usize::try_from(a).ok()).collect();
    axes.filter(|axes| axes.len() <= MAX_AXES).ok_or_else(|| {
        let shown: Vec<i64> = shape.iter().copied().take(MAX_AXES + 1).collect();
        let allowed = format!("at most {MAX_AXES} axes of 0 or more");
        TinkerError::value(format!("{field}.shape"), format!("{shown:?}"), allowed)
    })
}

/// A tensor in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JsonTensor {
    data: Vec<Number>,
    dtype: String,
    #[serde(default)]
    shape: Option<Vec<i64>>,
    #[serde(default)]
    sparse_crow_indices: Option<Vec<i64>>,
    #[serde(default)]
    sparse_col_indices: Option<Vec<i64>>,
}

impl JsonTensor {
    /// Reads it.
    pub(crate) fn read(self, field: &str) -> Result<SentTensor, TinkerError> {
        let values = match self.dtype.as_str() {
            "float32" => TensorValues::F32(json_floats(field, &self.data)?),
            "int64" => TensorValues::I64(json_integers(field, &self.data)?),
            other => {
                let name = format!("{field}.dtype");
                return Err(TinkerError::value(name, other, "float32 or int64"));
            }
        };
        let csr = match (self.sparse_crow_indices, self.sparse_col_indices) {
            (None, None) => None,
            (Some(rows), Some(columns)) => {
                let name = |part: &str| format!("{field}.{part}");
                let rows = unsigned(&name("sparse_crow_indices"), rows.into_iter())?;
                let columns = unsigned(&name("sparse_col_indices"), columns.into_iter())?;
                Some(Csr { rows, columns })
            }
            _ => {
                let name = format!("{field}.sparse_crow_indices");
                let hint = "sparse tensors have sparse_crow_indices and sparse_col_indices";
                return Err(TinkerError::missing(name, hint));
            }
        };
        let shape = match self.shape {
            Some(shape) => checked_shape(field, &shape)?,
            None if csr.is_none() => vec![values.len()],
            None => {
                let hint = "a sparse tensor has the shape of the dense one";
                return Err(TinkerError::missing(format!("{field}.shape"), hint));
            }
        };
        Ok(SentTensor { shape, values, csr })
    }
}

fn json_floats(field: &str, data: &[Number]) -> Result<Vec<f32>, TinkerError> {
    let float = |number: &Number| {
        let value = number.as_f64().map(|value| value as f32);
        value.filter(|value| value.is_finite()).ok_or_else(|| {
            TinkerError::value(
                format!("{field}.data"),
                number,
                "numbers within the range of float32",
            )
        })
    };
    data.iter().map(float).collect()
}

fn json_integers(field: &str, data: &[Number]) -> Result<Vec<i64>, TinkerError> {
    let integer = |number: &Number| {
        let whole = |value: &f64| value.fract() == 0.0 && value.abs() <= 9e15;
        let value = number.as_i64();
        let value = value.or_else(|| number.as_f64().filter(whole).map(|value| value as i64));
        value.ok_or_else(|| TinkerError::value(format!("{field}.data"), number, "integers"))
    };
    data.iter().map(integer).collect()
}
