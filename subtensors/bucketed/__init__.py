"""`st.bucketed`: a program over varying sizes as a few graphs of fixed ones."""
